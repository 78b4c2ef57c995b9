"""Conversations on disk, and which of their tokens the target itself would have to produce.

The loss mask comes from the tokenizer alone: prefixes of the conversation are rendered with its chat template, which
gives the assistant's characters, and the offsets of one tokenisation of the whole text give the tokens. Knows
tokenizers, no models.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Literal

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.templates import Message, answer_span, render

logger = logging.getLogger(__name__)

Turns = Literal["all", "last"]
"""Which assistant turns are supervised."""


@dataclass(frozen=True)
class Conversation:
    """One conversation, or a prompt (it then ends on a user turn)."""

    id: str
    messages: list[Message]
    finish_reason: str | None = None
    """Why the last answer ended; "length" means that it was cut, so its end is not supervised."""
    source: str | None = None


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation and, for each, whether the target itself would have to produce it."""

    token_ids: list[int]
    loss_mask: list[bool]


def load_conversations(source: str | Path, *, limit: int | None = None) -> list[Conversation]:
    """Load conversations, or prompts, in the `messages` or the ShareGPT (`conversations`) layout.

    Rows may carry `id` (default: the number of the line), `source` and `finish_reason`; other columns are ignored.

    Args:
        source: A JSONL or Parquet file; a folder or a name on the hub, read through `datasets`, with an optional split:
            `name:split` (default: `train`).
        limit: Load at most the first `limit` conversations.

    Raises:
        ValueError: For the first row that is no conversation, naming file, line and what is wrong with it; for an id
            that occurs twice; for a file that does not exist or holds no conversation.
    """
    conversations: list[Conversation] = []
    first_seen: dict[str, str] = {}
    for place, number, row in islice(read_rows(source, limit), limit):
        try:
            conversation = _to_conversation(json.loads(row) if isinstance(row, bytes) else row, number)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{place}: invalid JSON ({error}); correct or remove the line") from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if conversation.id in first_seen:
            raise ValueError(f"{place}: id {conversation.id!r} is already used at {first_seen[conversation.id]}")
        first_seen[conversation.id] = place
        conversations.append(conversation)
    if not conversations:
        raise ValueError(f"{source}: no conversations (limit={limit})")
    return conversations


def read_rows(source: str | Path, limit: int | None) -> Iterator[tuple[str, int, object]]:
    """Yield place, number (from 1) and content of each row: an undecoded line of JSONL, or an object."""
    path = Path(source)
    name, _, split = str(source).partition(":")
    if path.is_file() and path.suffix != ".parquet":
        with path.open("rb") as file:
            yield from ((f"{path}:{number}", number, line) for number, line in enumerate(file, 1) if line.strip())
    elif path.is_file():
        import pyarrow.parquet  # comes with datasets

        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path}:row {number}", number, row) for number, row in enumerate(rows, 1))
    elif path.suffix in {".jsonl", ".json", ".parquet"} or (path.is_absolute() and not Path(name).is_dir()):
        raise ValueError(f"{path}: no such file")
    else:
        import datasets

        dataset = datasets.load_dataset(name, split=split or "train", streaming=limit is not None)
        yield from ((f"{source}:row {number}", number, row) for number, row in enumerate(dataset, 1))


def _to_conversation(row: object, number: int) -> Conversation:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if row.get("messages") is not None:
        turns, role_key, text_key = row["messages"], "role", "content"
        roles = {"system": "system", "user": "user", "assistant": "assistant"}
    elif row.get("conversations") is not None:
        turns, role_key, text_key = row["conversations"], "from", "value"
        roles = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
    else:
        raise ValueError(f"expected `messages` or `conversations`, got the keys {sorted(map(str, row))}")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected a list of turns, got {json.dumps(turns)[:80]}")
    messages = []
    for place, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or turn.get(role_key) not in roles:
            got = turn.get(role_key) if isinstance(turn, dict) else turn
            raise ValueError(f"turn {place}: `{role_key}` must be one of {', '.join(roles)}, got {got!r}")
        text = turn.get(text_key)
        if not isinstance(text, str):
            raise ValueError(f"turn {place}: `{text_key}` must be a string, got {type(text).__name__}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"turn {place}: `{text_key}` has half of a surrogate pair, which no tokenizer can encode")
        messages.append({"role": roles[turn[role_key]], "content": text})
        if messages[-1]["role"] == "assistant" and all(message["role"] != "user" for message in messages):
            raise ValueError(f"turn {place}: an assistant turn comes before any user turn")
    name, finish_reason, source = row.get("id"), row.get("finish_reason"), row.get("source")
    if name is not None and not isinstance(name, str | int):
        raise ValueError(f"`id` must be a string or a number, got {type(name).__name__}")
    if finish_reason is not None and not isinstance(finish_reason, str):
        raise ValueError(f"`finish_reason` must be a string, got {type(finish_reason).__name__}")
    source = source if isinstance(source, str) else None
    return Conversation(str(number if name is None else name), messages, finish_reason, source)


def encode_conversation(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, max_length: int, turns: Turns = "all"
) -> Encoded:
    """Return the tokens of a conversation, supervised where the target would have to produce them.

    Supervised are the assistant's text and the token that ends its turn, not what the template appends after that. An
    answer cut by a length limit (`finish_reason`) has no end to supervise. User turns after the last answer are left
    out.

    Args:
        conversation: What is encoded.
        tokenizer: A fast tokenizer with a chat template.
        max_length: Tokens after the first `max_length` are cut off.
        turns: "all" assistant turns or only the "last", for templates that rewrite earlier turns.

    Raises:
        ValueError: If the template refuses the conversation or rewrites earlier turns, or the tokenizer is a slow one.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets; use the fast tokenizer of this model")
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    messages = conversation.messages[: answers[-1] + 1] if answers else conversation.messages
    cut = conversation.finish_reason == "length" and conversation.messages[-1]["role"] == "assistant"
    text = render(messages, tokenizer, name=conversation.id)
    supervised = answers if turns == "all" else answers[-1:]
    spans = {answer: answer_span(conversation.id, messages, answer, text, tokenizer) for answer in supervised}
    if cut:
        start, text_end, _ = spans[answers[-1]]
        content = messages[-1]["content"]
        if text[start:text_end].strip() != content.strip():  # Qwen3's puts empty thoughts before those that were cut
            text = text[:start] + content
            spans[answers[-1]] = start, len(text), len(text)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    token_ids: list[int] = encoding["input_ids"]
    offsets: list[tuple[int, int]] = encoding["offset_mapping"]
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.add(tokenizer.eos_token_id)
    loss_mask = [False] * len(token_ids)
    for answer, (start, text_end, stop) in spans.items():
        # byte-level tokenizers trim spaces off the offsets: a token of spaces is empty and lies at its end
        inside = [index for index, (left, right) in enumerate(offsets) if start <= left and start < right <= stop]
        ends = [index for index in inside if token_ids[index] in special and offsets[index][0] >= text_end]
        for index in inside:
            has_end = bool(ends) and not (cut and answer == answers[-1])
            loss_mask[index] = index <= ends[0] if has_end else offsets[index][1] <= text_end
    return Encoded(token_ids[:max_length], loss_mask[:max_length])


def encode_all(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, *, max_length: int, turns: Turns = "all"
) -> list[Encoded]:
    """Encode all conversations; those without a supervised token (after truncation) are left out, and logged.

    Raises:
        ValueError: If no token or every token is supervised, or `encode_conversation` refuses one.
    """
    progress = tqdm(conversations, desc="encode", unit=" conversations", delay=2)
    encoded = [encode_conversation(each, tokenizer, max_length=max_length, turns=turns) for each in progress]
    total = sum(len(sample.token_ids) for sample in encoded)
    supervised = sum(sum(sample.loss_mask) for sample in encoded)
    if supervised in (0, total):
        raise ValueError(
            f"{supervised} of {total} tokens in {len(encoded)} conversations are supervised: expected only what the "
            f"assistant says; check the data, the chat template and max_length={max_length} with "
            "`python -m data.conversations preview FILE --target TARGET`"
        )
    kept = [sample for sample in encoded if any(sample.loss_mask)]
    if len(kept) < len(encoded):
        names = [c.id for c, sample in zip(conversations, encoded, strict=True) if not any(sample.loss_mask)]
        logger.warning(
            "%d of %d conversations have no supervised token within max_length=%d and are left out: %s%s",
            len(names), len(encoded), max_length, ", ".join(names[:5]), ", ..." if len(names) > 5 else "",
        )  # fmt: skip
    return kept


def preview(conversation: Conversation, encoded: Encoded, tokenizer: PreTrainedTokenizerBase, *, colour: bool) -> str:
    """Return a conversation's text with supervised tokens in green, or in [[brackets]], under a line of counts."""
    mark, unmark = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    pieces = []
    for supervised, pairs in groupby(zip(encoded.token_ids, encoded.loss_mask, strict=True), key=lambda pair: pair[1]):
        piece = str(tokenizer.decode([token_id for token_id, _ in pairs], skip_special_tokens=False))
        pieces.append(f"{mark}{piece}{unmark}" if supervised else piece)
    count, total = sum(encoded.loss_mask), len(encoded.token_ids)
    return f"--- {conversation.id}: {count} of {total} tokens supervised\n" + "".join(pieces)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `python -m data.conversations preview`."""
    parser = argparse.ArgumentParser(prog="python -m data.conversations", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser("preview", help="show which tokens are supervised")
    command.add_argument("source", help="JSONL or Parquet file, folder, or name on the hub (name:split)")
    command.add_argument("--target", required=True, help="model name or folder whose tokenizer is used")
    command.add_argument("--num", type=int, default=3, help="how many conversations to show (default: %(default)s)")
    command.add_argument("--max-length", type=int, default=2048, help="tokens kept (default: %(default)s)")
    command.add_argument("--turns", choices=["all", "last"], default="all", help="assistant turns to supervise")
    args = parser.parse_args(argv)
    try:
        conversations = load_conversations(args.source, limit=args.num)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        for each in conversations:
            encoded = encode_conversation(each, tokenizer, max_length=args.max_length, turns=args.turns)
            print(preview(each, encoded, tokenizer, colour=sys.stdout.isatty()))
    except (ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
