"""What is supervised in a conversation, as text."""

from data.conversations import Conversation, encode_conversation


def create_conversation(messages, **fields):
    return Conversation("c", messages, **fields)


def supervised_runs(conversation, tokenizer, **options):
    """Return the text of each run of supervised tokens."""
    encoded = encode_conversation(conversation, tokenizer, max_length=1000, **options)
    runs, previous = [], False
    for token_id, supervised in zip(encoded.token_ids, encoded.loss_mask, strict=True):
        if supervised:
            runs[-1].append(token_id) if previous else runs.append([token_id])
        previous = supervised
    return [tokenizer.decode(run) for run in runs]
