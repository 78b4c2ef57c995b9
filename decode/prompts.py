"""What a user may pass as a prompt, and the tokens it stands for."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.target import Target

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Tensor
"""Text, token ids (a list or a 1-D tensor), or chat messages."""


def split_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether it was one prompt rather than a batch (a 2-D tensor is a batch).

    Raises:
        ValueError: If the batch is empty.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], int | Mapping):
        return [items], True
    if not items:
        raise ValueError("got an empty list: a prompt has at least one token, a batch at least one prompt")
    return items, False


def to_token_ids(target: Target, prompt: Prompt, *, raw: bool) -> list[int]:
    """Return the tokens of one prompt.

    Text becomes a user message rendered with the tokenizer's chat template, unless `raw` or there is no template.
    Messages are rendered with the opening of the assistant's answer behind them.

    Raises:
        ValueError: If it is no prompt or empty, needs a tokenizer that is not there, or holds ids outside the
            vocabulary.
    """
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | Sequence):
        raise ValueError(f"a prompt is text, token ids or chat messages, got {prompt!r}")
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], int):
        ids = [int(token) for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            raise ValueError("a prompt of token ids must hold numbers only")
        bad = [token for token in ids if not 0 <= token < target.vocab_size]
        if bad:
            raise ValueError(f"token ids must be in [0, {target.vocab_size}), got {bad[:5]}")
        return ids
    if len(prompt) == 0 or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError("the prompt is empty; give at least one token of text")
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer: pass token ids, or Target(model, tokenizer)")
    plain = isinstance(prompt, str) and (raw or tokenizer.chat_template is None)
    text = prompt if isinstance(prompt, str) and plain else _render(tokenizer, prompt, raw=raw)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not Unicode text ({error}); correct its encoding") from error
    # a template writes the special tokens itself
    ids = list(tokenizer(text, add_special_tokens=plain)["input_ids"])
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    return ids


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, raw: bool) -> str:
    """Return what the chat template makes of text or messages, up to the opening of the answer."""
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"a prompt is text, token ids or chat messages, got {reprlib.repr(prompt)}")
    if raw:
        raise ValueError("raw=True takes text as it is, but got chat messages, which only a template can render")
    if tokenizer.chat_template is None:
        raise ValueError("chat messages need a chat template, which this tokenizer has not; pass text")
    try:
        turns = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: it adds contents that are no text
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file: `messages`, `conversations`, `turns` (the first is used) or `prompt` in each row.

    A last assistant turn is left out: it is the answer, not the prompt.

    Raises:
        ValueError: If a line is broken or holds none of these; it names the line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"at least 1 prompt must be read, got a limit of {limit}")
    prompts: list[Prompt] = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(prompts) == limit:
                break
            if not line.strip():
                continue
            try:
                prompt = _to_prompt(json.loads(line.decode()))
            except (ValueError, TypeError, KeyError, IndexError) as error:  # of JSON and UTF-8 too
                raise ValueError(
                    f"{path}:{number}: expected a JSON object with `messages`, `conversations`, `turns` or `prompt` "
                    f"({error!r}); mend or delete the line"
                ) from error
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _to_prompt(row: Mapping[str, Any]) -> Prompt:
    if "conversations" in row:
        roles = {"human": "user", "gpt": "assistant"}
        messages = [{"role": roles.get(t["from"], t["from"]), "content": t["value"]} for t in row["conversations"]]
    elif "messages" in row:
        messages = list(row["messages"])
    elif "turns" in row:
        if not isinstance(row["turns"], list):
            raise ValueError("`turns` is not a list")
        return _checked(row["turns"][0])
    else:
        return _checked(row["prompt"])
    return _checked(messages[:-1] if messages[-1]["role"] == "assistant" else messages)


def _checked(prompt: Any) -> Prompt:
    """Return what a file gives as a prompt if it is one.

    Raises:
        ValueError: If it is not, or no Unicode text (JSON can spell half a character).
    """
    kinds = {type(item) for item in prompt} if isinstance(prompt, list) else set()
    is_chat = kinds == {dict} and all(map(_is_message, prompt))
    if not (is_chat or kinds == {int} or (isinstance(prompt, str) and prompt.strip())):
        raise ValueError(f"{reprlib.repr(prompt)} is no text, token ids or messages with `role` and `content`")
    json.dumps(prompt, ensure_ascii=False).encode()
    found: Prompt = prompt
    return found


def _is_message(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    calls = content is None and bool(message.get("tool_calls"))  # a call of a tool needs no text
    return isinstance(message.get("role"), str) and (calls or isinstance(content, str | list))


def token_limits(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Return how many new tokens each prompt may take: `max_new_tokens`, or what its context leaves.

    Raises:
        ValueError: If there is no room for one.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    for row, prompt in enumerate(prompts):
        if len(prompt) >= target.max_length:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens, but the target's context is {target.max_length}; "
                "shorten the prompt"
            )
    return [min(max_new_tokens, target.max_length - len(prompt)) for prompt in prompts]
