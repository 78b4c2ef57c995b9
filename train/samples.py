"""Texts of an evaluation, with the tokens coloured that the head had drafted.

They are in `samples.html` of the run's folder, newest first, and the first of them in the log.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode import Generation, Stats, Target
from heads.files import write_atomically

SAMPLES = "samples.html"
LINE = 160
"""Characters of a text that the log shows."""
LEGEND = "green: drafts that were accepted; plain: the target's own tokens"
STYLE = (
    "<style>body{font-family:sans-serif;margin:1em;background:#fff;color:#000}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:1.05em;margin:.3em 0 1.2em}"
    "mark{background:#a6e3b8;color:#000;outline:1px solid #fff}</style>"
)
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>samples</title>'
    f"{STYLE}<h1>Samples, greedy, newest evaluation first</h1><p><mark>green</mark>{LEGEND.removeprefix('green')}</p>"
)
SECTION = re.compile(r'<section data-step="(\d+)">.*</section>')


@dataclass(frozen=True)
class Sample:
    """One greedy text decoded with the head."""

    prompt_set: str
    prompt: str
    pieces: Sequence[tuple[str, bool]]
    """Text of each token, and whether it was an accepted draft. A character of several tokens is with its last."""
    tokens_per_step: float

    def to_html(self) -> str:
        """Return the text as one line of HTML: a `mark` for each accepted draft."""
        shown = (
            f"<mark>{_escape(text.replace(chr(10), '⏎' + chr(10)))}</mark>" if drafted and text else _escape(text)
            for text, drafted in self.pieces
        )
        return f"<pre>{''.join(shown)}</pre>"

    def to_line(self, *, colour: bool) -> str:
        """Return the beginning of the text as one line for a terminal, drafts in green, or in [[brackets]]."""
        mark, unmark = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
        left, shown = LINE, []
        for drafted, run in groupby(self.pieces, key=lambda piece: piece[1]):
            text = "".join(text for text, _ in run)[:left]
            left -= len(text)
            text = "".join(char if char.isprintable() else "⏎" if char == "\n" else " " for char in text)
            shown.append(f"{mark}{text}{unmark}" if drafted and text else text)
        return f"sample of {self.prompt_set}, {self.tokens_per_step:.2f} tokens per step: {''.join(shown)}"


def make_sample(target: Target, prompt_set: str, output: Generation) -> Sample:
    """Return what one greedy text shows, special tokens included."""
    tokenizer = target.tokenizer
    assert tokenizer is not None  # the training data was encoded with it
    pieces = zip(token_texts(tokenizer, output.token_ids), accepted_drafts(output.stats), strict=True)
    prompt = str(tokenizer.decode(output.prompt_ids, skip_special_tokens=False))
    return Sample(prompt_set, prompt, list(pieces), output.stats.tokens_per_step)


def accepted_drafts(stats: Stats) -> list[bool]:
    """Return for each new token of one row whether it was a draft.

    The prefill gives one token of the target's own, and every step ends in one, unless the text ended before it.
    """
    marks = [place < size for _, size in stats.bursts for place in range(1, size + 1)]
    if sum(marks) < sum(stats.accepted):
        marks[-1] = True
    return marks


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> Iterator[str]:
    """Yield the text that each token adds: nothing, while a character is not whole."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    start, done = 0, 0  # decoded from the last piece on: how a token is written can depend on the one before it
    for end in range(1, len(token_ids) + 1):
        before, now = decode(token_ids[start:done]), decode(token_ids[start:end])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            yield ""
            continue
        yield now[len(before) :]
        start, done = done, end


def write_samples(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Put the samples of an evaluation at the top of the page `path`, in place of those that a continued run remakes.

    Raises:
        OSError: If it cannot be read or written.
    """
    texts = "".join(
        f"<h3>{_escape(sample.prompt_set)}, {sample.tokens_per_step:.2f} tokens per step</h3>"
        f"<details><summary>prompt</summary><pre>{_escape(sample.prompt)}</pre></details>{sample.to_html()}"
        for sample in samples
    )
    lines = [HEAD, f'<section data-step="{step}"><h2>step {step}</h2>{texts}</section>']
    if path.exists():
        found = map(SECTION.fullmatch, path.read_text(encoding="utf-8").split("\n"))
        lines += [section[0] for section in found if section is not None and int(section[1]) < step]
    write_atomically(path, lambda new: new.write_text("\n".join(lines), encoding="utf-8"))


def _escape(text: str) -> str:
    """Return text for HTML on one line."""
    return html.escape(text).replace("\n", "&#10;").replace("\r", "&#13;")
