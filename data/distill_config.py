"""Settings of a distillation, and what one run of it did."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from decode import Sampling

LOCAL = ("batch_size", "dtype", "device")
"""Settings that mean something only where the target is loaded here."""
REMOTE = ("server_model", "concurrency", "timeout", "retries", "any_template")
"""Settings that mean something only with a server."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Settings of one run; `python -m data.distill --help` explains each."""

    target: str
    prompts: str | Path
    out: Path
    max_new_tokens: int = 512
    batch_size: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None
    dtype: str = "auto"
    device: str | None = None
    skip_long: bool = False
    exclude: tuple[str | Path, ...] = ()
    server: str | None = None
    server_model: str | None = None
    concurrency: int = 64
    timeout: float = 600.0
    retries: int = 10
    any_template: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}; leave it out to answer all prompts")
        if self.timeout <= 0 or self.retries < 0:
            raise ValueError(f"timeout must be above 0 and retries at least 0, got {self.timeout} and {self.retries}")
        if self.server is not None and urlsplit(self.server).scheme not in ("http", "https"):
            raise ValueError(f"server must be a URL such as http://localhost:8000/v1, got {self.server!r}")
        Sampling(temperature=self.temperature, top_p=self.top_p)  # refuses impossible values
        idle = REMOTE if self.server is None else LOCAL
        given = [each.name for each in fields(self) if each.name in idle and vars(self)[each.name] != each.default]
        if given:
            why = "need --server" if self.server is None else "are the server's own affair with --server"
            raise ValueError(f"{', '.join(given)} {why}; leave out what does not apply")


@dataclass
class Tally:
    """What came of a run so far."""

    new_answers: int = 0
    new_tokens: int = 0
    other_lengths: int = 0
    """Prompts that the server made more or fewer tokens of than the target's template."""
    same_lengths: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """By the id of the prompt: why the server did not answer it."""


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    finish_reasons: dict[str, int]
    """Number of rows in the output by how they ended, those of earlier runs included."""
    new_answers: int
    new_tokens: int
    seconds: float
    failed: dict[str, str] = field(default_factory=dict)
    """By the ids of prompts that the server did not answer: why."""
    left_out: int | None = None
    """Prompts that match an evaluation prompt; None if none were compared."""

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.finish_reasons.items()))
        left_out = "" if self.left_out is None else f" | left out {self.left_out} that match evaluation prompts"
        failed = f" | failed {len(self.failed)}" if self.failed else ""
        return (
            f"answers {sum(self.finish_reasons.values())} ({reasons}) | new {self.new_answers} | new tokens "
            f"{self.new_tokens:,} | {self.seconds:.1f} s | {self.new_tokens / max(self.seconds, 1e-9):.1f} tokens/s"
            f"{left_out}{failed}"
        )
