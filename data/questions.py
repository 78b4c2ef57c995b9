"""Prompts that wait for an answer: checked before anything is loaded or asked, ordered, and made rows."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from data.conversations import Conversation, load_conversations
from data.distill_config import DistillConfig
from data.templates import render

WINDOW = 1024
"""Prompts are sorted by length within windows of so many, so that little of a batch is padding."""


def load_prompts(source: str | Path, *, limit: int | None = None) -> list[Conversation]:
    """Load conversations that wait for an answer.

    Raises:
        ValueError: If a row is broken, or a conversation does not end on a user turn with text; it names them all.
    """
    prompts = load_conversations(source, limit=limit)
    answered = [prompt.id for prompt in prompts if prompt.messages[-1]["role"] == "assistant"]
    empty = [prompt.id for prompt in prompts if not prompt.messages[-1]["content"].strip()]
    other = [prompt.id for prompt in prompts if prompt.messages[-1]["role"] == "system"]
    if answered:
        raise ValueError(f"{source}: already answered: {list_ids(answered)}; remove the last assistant turns")
    if other or empty:
        raise ValueError(f"{source}: no question to answer: {list_ids(other or empty)}; end each on a user turn")
    return prompts


def load_limits(name: str) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer and the context length of a target, without loading its weights."""
    config = AutoConfig.from_pretrained(name).get_text_config()
    return AutoTokenizer.from_pretrained(name), int(config.max_position_embeddings)


def count_tokens(prompts: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return each prompt's length as the target's chat template renders it, by its id."""
    progress = tqdm(prompts, desc="check prompts", unit=" prompts", delay=2)
    return {prompt.id: len(encode_prompt(prompt, tokenizer)) for prompt in progress}


def drop_long(
    prompts: Sequence[Conversation], lengths: Mapping[str, int], context: int, config: DistillConfig
) -> list[Conversation]:
    """Return the prompts that fit into the context with their answer; refuse (or leave out) those that do not."""
    too_long = [prompt.id for prompt in prompts if lengths[prompt.id] + config.max_new_tokens > context]
    if too_long and not config.skip_long:
        raise ValueError(
            f"{config.prompts}: longer than {context - config.max_new_tokens} tokens (the target's context of "
            f"{context} less max_new_tokens={config.max_new_tokens}): {list_ids(too_long)}; shorten them, lower "
            "max_new_tokens, or leave them out with --skip-long"
        )
    return [prompt for prompt in prompts if lengths[prompt.id] + config.max_new_tokens <= context]


def sort_windows(prompts: Sequence[Conversation], lengths: Mapping[str, int]) -> list[Conversation]:
    """Return the prompts sorted by length within windows, so that those of one batch are of similar length."""
    windows = (prompts[start : start + WINDOW] for start in range(0, len(prompts), WINDOW))
    # longest first: if a batch does not fit into memory, it is the first one
    return [prompt for window in windows for prompt in sorted(window, key=lambda prompt: -lengths[prompt.id])]


def encode_prompt(prompt: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a prompt, up to the opening of the answer."""
    text = render(prompt.messages, tokenizer, name=prompt.id, generation_prompt=True)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids


def to_row(prompt: Conversation, text: str, *, is_cut: bool) -> dict[str, object]:
    """Return the row of the output that holds a prompt and its answer."""
    # a cut can fall inside a character of several tokens
    text = text.rstrip("\ufffd") if is_cut else text
    source = {} if prompt.source is None else {"source": prompt.source}
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    return {"id": prompt.id, **source, "messages": messages, "finish_reason": "length" if is_cut else "stop"}


def prompt_seed(seed: int, name: str) -> int:
    """Return a prompt's own seed, so that its text does not depend on which prompts are answered with it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) >> 1


def hash_prompts(source: str | Path, prompts: Sequence[Conversation]) -> str:
    """Return the SHA-256 of the prompts' file, or of the loaded prompts if they are not in one file."""
    if Path(source).is_file():
        with Path(source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps([(prompt.id, prompt.messages) for prompt in prompts]).encode()).hexdigest()


def list_ids(names: Sequence[str]) -> str:
    """Return how many prompts these are, and the first of them."""
    return f"{len(names)} prompts ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})"
