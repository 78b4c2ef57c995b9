"""What decoding returns: text, tokens, why it ended, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["eos", "stop", "length"]
"""An end-of-text token, a stop string, or the limit on new tokens or context."""


@dataclass
class Stats:
    """Counts of one row; times of the whole batch it was decoded in."""

    rows: int = 1
    """Rows these counts are of; more than 1 in a `total`."""
    steps: int = 0
    """Target passes that verified a tree (the prefill not counted)."""
    tokens: int = 0
    """New tokens, the one that the prefill gives included."""
    offered: list[int] = field(default_factory=list)
    """`offered[d]`: steps whose path reached depth d at a node that had children."""
    accepted: list[int] = field(default_factory=list)
    """`accepted[d]`: how many of them went on to depth d + 1."""
    seconds: float = 0.0
    """Wall time from the start of the prefill to the end of this row."""
    parts: dict[str, float] = field(default_factory=dict)
    """Wall seconds of the batch in prefill, propose, score, accept and commit. On a GPU, work is queued: a part can
    hold time of the one before."""
    bursts: list[tuple[float, int]] = field(default_factory=list)
    """For the prefill and every step, the seconds since the start after which its new tokens were there, and their
    number: the gaps that a client sees."""

    @property
    def tokens_per_step(self) -> float:
        """New tokens per target pass; 1.0 is plain decoding. The token that the prefill gives is not counted."""
        return (self.tokens - self.rows) / self.steps if self.steps else 1.0

    @property
    def accept_rates(self) -> list[float]:
        """For each depth, the share of offers accepted, given that the parent was."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    def count(self, path_length: int, *, had_children: bool) -> None:
        """Count a step whose path has `path_length` nodes, the last of which had children or not."""
        self.steps += 1
        reached = path_length - 1
        needed = reached + had_children
        for counts in (self.offered, self.accepted):
            counts.extend([0] * (needed - len(counts)))
        for depth in range(needed):
            self.offered[depth] += 1
            self.accepted[depth] += depth < reached

    @classmethod
    def total(cls, rows: list[Stats]) -> Stats:
        """Add up counts and times of several results that were decoded one after the other; bursts are left out."""
        depth = max((len(row.offered) for row in rows), default=0)
        merged = cls(
            rows=sum(r.rows for r in rows), steps=sum(r.steps for r in rows), tokens=sum(r.tokens for r in rows)
        )
        merged.offered = [sum(r.offered[d] for r in rows if d < len(r.offered)) for d in range(depth)]
        merged.accepted = [sum(r.accepted[d] for r in rows if d < len(r.accepted)) for d in range(depth)]
        merged.seconds = sum(r.seconds for r in rows)
        for row in rows:
            for part, seconds in row.parts.items():
                merged.parts[part] = merged.parts.get(part, 0.0) + seconds
        return merged


@dataclass(frozen=True)
class Generation:
    """The result for one prompt."""

    text: str
    """Decoded new tokens without special tokens, cut before a stop string; empty if the target has no tokenizer."""
    token_ids: list[int]
    """New tokens, up to and including the one that ended the text."""
    prompt_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    seed: int
    """Seed of this row: a single prompt with it gives this text again. For a row r > 0 of a batch with one seed, pass
    the same batch."""
    logprobs: list[float] | None = None
    """Log-probability of each new token under the target's raw logits (before temperature and processors), if asked
    for."""


@dataclass(frozen=True)
class Delta:
    """A piece of one row's text, final as soon as it is yielded."""

    row: int
    text: str
    """Text that became final: no half characters, no beginning of a stop string. Pieces add up to `Generation.text`."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Set on the last piece of the row."""
    result: Generation | None = None
    """The whole result, on the last piece of the row."""
