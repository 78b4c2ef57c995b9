"""What a user may pass as a prompt, and the tokens it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from torch import Tensor

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
        ValueError: If the prompt is empty, needs a tokenizer that is not there, or holds ids outside the vocabulary.
    """
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
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
    messages: Sequence[Message] | None = None
    if isinstance(prompt, str):
        if not raw and tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": prompt}]
    else:
        messages = prompt  # type: ignore[assignment]
        if raw:
            raise ValueError("raw=True takes text as it is, but got chat messages, which only a template can render")
        if tokenizer.chat_template is None:
            raise ValueError("chat messages need a chat template, which this tokenizer has not; pass text")
    if messages is None:
        ids = tokenizer(prompt)["input_ids"]
    else:
        try:
            turns = [dict(message) for message in messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        # the template writes the special tokens itself
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    return ids


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file: `messages`, `conversations`, `turns` (the first is used) or `prompt` in each row.

    A last assistant turn is left out: it is the answer, not the prompt.

    Raises:
        ValueError: If a line is broken or holds none of these; it names the line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"at least 1 prompt must be read, got a limit of {limit}")
    prompts: list[Prompt] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(prompts) == limit:
                break
            if not line.strip():
                continue
            try:
                prompt = _to_prompt(json.loads(line))
            except (json.JSONDecodeError, TypeError, KeyError, IndexError) as error:
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
    else:
        prompt: Prompt = row["turns"][0] if "turns" in row else row["prompt"]
        return prompt
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


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
