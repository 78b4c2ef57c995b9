"""What a user may pass as a prompt, and the tokens it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        if tokenizer.chat_template is None:
            raise ValueError("chat messages need a chat template, which this tokenizer has not; pass text")
    if messages is None:
        ids = tokenizer(prompt)["input_ids"]
    else:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        # the template writes the special tokens itself
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    return ids


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file: `messages`, `turns` (the first is used) or `prompt` in each line.

    Raises:
        ValueError: If a line is broken or holds none of these; it names the line.
    """
    prompts: list[Prompt] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(prompts) == limit:
                break
            try:
                row = json.loads(line)
                prompt = row["messages"] if "messages" in row else row["turns"][0] if "turns" in row else row["prompt"]
            except (json.JSONDecodeError, TypeError, KeyError, IndexError) as error:
                raise ValueError(
                    f"{path}:{number}: expected a JSON object with `messages`, `turns` or `prompt` ({error!r}); "
                    "mend or delete the line"
                ) from error
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
