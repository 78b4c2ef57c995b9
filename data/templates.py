"""What a tokenizer's chat template makes of messages, and where in its text an answer is."""

import re
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

TODAY = datetime(2024, 7, 26)
"""In templates that write the date, as Llama 3.2's does, so that a run can be continued tomorrow."""
ASKS_THE_CLOCK = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")


def render(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, name: str, generation_prompt: bool = False
) -> str:
    """Return the text of `messages` by the tokenizer's chat template; `name` is the conversation's, for errors.

    Raises:
        ValueError: If there is no template or it refuses the messages.
    """
    options: dict[str, Any] = {}
    template = vars(tokenizer).get("chat_template")  # mistral-common's tokenizers have none
    if isinstance(template, str):
        options["chat_template"] = ASKS_THE_CLOCK.sub(lambda found: repr(TODAY.strftime(found[2])), template)
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **options
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"conversation {name!r}: the chat template refuses it: {error}") from error
    return str(text)


def answer_span(
    name: str, messages: list[Message], answer: int, text: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int, int]:
    """Return where in `text` the turn `messages[answer]` starts, where its content ends and where the turn ends.

    Raises:
        ValueError: If the template rewrites the turn, or its generation prompt does not begin it.
    """
    before = render(messages[:answer], tokenizer, name=name, generation_prompt=True)
    after = render(messages[: answer + 1], tokenizer, name=name)
    if not text.startswith(after):
        raise ValueError(
            f"conversation {name!r}: the chat template writes turn {answer + 1} differently once more turns follow, so "
            "its tokens cannot be supervised; use turns='last' (--data.turns=last in training) to supervise only the "
            "last assistant turn"
        )
    if not after.startswith(before):
        raise ValueError(
            f"conversation {name!r}: the chat template's generation prompt ({before[-40:]!r}) does not begin turn "
            f"{answer + 1} of the whole conversation, so it is unknown where the answer starts; use turns='last' if "
            "the template rewrites earlier turns, else a template whose generation prompt starts an answer"
        )
    # the template's own ending is what stays the same when the content ends in another character
    content = messages[answer]["content"]
    other = {"role": "assistant", "content": content + ("y" if content.rstrip().endswith("x") else "x")}
    probe = render([*messages[:answer], other], tokenizer, name=name)
    ending = next((n for n, (a, b) in enumerate(zip(reversed(after), reversed(probe), strict=False)) if a != b), 0)
    return len(before), max(len(before), len(after) - ending), len(after)
