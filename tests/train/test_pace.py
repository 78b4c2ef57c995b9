"""Speed and remaining time from the first steps."""

import time
from types import SimpleNamespace

import pytest

from train.pace import Pace


class Source:
    """Ten conversations of 100 tokens; the target needs 0.01 s for a token."""

    def __init__(self) -> None:
        self.target_seconds, self.target_tokens = 0.0, 0

    def num_tokens(self, indices) -> int:
        return 100 * len(indices)

    def compute(self, tokens: int) -> None:
        self.target_seconds += tokens / 100
        self.target_tokens += tokens


def run_steps(monkeypatch: pytest.MonkeyPatch, work: object, filling: int = 0, compute: bool = True) -> list[str]:
    now, said, source = [0.0], [], Source()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace = Pace(work, source, said.append, filling)  # type: ignore[arg-type]
    for seconds in (50, 8, 8, 100):  # the first allocates
        now[0] += 1000  # an evaluation
        pace.begin()
        if compute:
            source.compute(400)
        now[0] += seconds
        pace.end([0, 1, 2, 3])
    return said


def make_work(steps: int, kept: int, folder: str | None = None) -> SimpleNamespace:
    config = SimpleNamespace(optim=SimpleNamespace(batch_size=4), data=SimpleNamespace(feature_dir=folder))
    return SimpleNamespace(
        config=config, steps=range(steps), samples=[None] * 10, kept=(kept, False), state_size=1, processes=1
    )


def test_states_that_are_kept_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    (line,) = run_steps(monkeypatch, make_work(5, kept=1000))  # 2,000 tokens at 0.01 s, and 1,000 of the target
    assert "plan: 50 tokens per second, 100 where the target's states are kept; about 00:30 for 5 steps" in line


def test_states_that_are_not_kept_are_computed_in_every_epoch(monkeypatch: pytest.MonkeyPatch):
    (line,) = run_steps(monkeypatch, make_work(5, kept=500))
    assert "about 00:35 for 5 steps" in line


def test_states_of_a_folder_are_computed_if_they_are_missing(monkeypatch: pytest.MonkeyPatch):
    (line,) = run_steps(monkeypatch, make_work(5, kept=0, folder="there"), filling=700)
    assert "about 00:27 for 5 steps" in line
    (line,) = run_steps(monkeypatch, make_work(5, kept=0, folder="there"), compute=False)
    assert "plan: 50 tokens per second; about 00:40 for 5 steps" in line
