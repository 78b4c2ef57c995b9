"""The speed of training, beside that of the target alone."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.conversations import Encoded
from data.features import OnlineFeatures
from decode import Target
from train import throughput
from train.throughput import Clock, TimedFeatures, describe

Launch = Callable[..., Path]
SPENT = {
    "together": 5.0,
    "apart": 8.0,
    "target": 8.0,
    "batch": 0.5,
    "forward": 0.75,
    "backward": 0.5,
    "optimiser": 0.25,
}


@pytest.fixture
def work(make_tiny_llama: Callable[[], torch.nn.Module]) -> SimpleNamespace:
    config = SimpleNamespace(
        optim=SimpleNamespace(batch_size=4), target=SimpleNamespace(dtype="float32"), precision="bf16"
    )
    target = Target(make_tiny_llama(), name="tiny")
    samples = [Encoded(list(range(2, 2 + n)), [True] * n) for n in (5, 9, 7)]
    head = SimpleNamespace(kind="medusa", feature_layers=(1,))
    return SimpleNamespace(config=config, target=target, head=head, samples=samples, processes=1)


def test_speeds_are_those_of_the_parts_and_the_bound_is_the_faster_way_to_run_the_target(work: SimpleNamespace):
    lines = describe(work, SPENT, tokens=1000, steps=3)
    assert lines[0] == (
        "throughput: 3 steps of 4 conversations, 1,000 tokens; medusa on tiny, cpu, float32, heads in bf16"
    )
    found = [re.fullmatch(r"throughput: (.*?) +(\d+) tokens/s, (.*) of the target alone", line) for line in lines[1:5]]
    assert [match.groups() for match in found if match] == [
        ("target alone, a micro-batch at a time", "200", "1.00"),
        ("target alone, a conversation at a time", "125", "0.62"),
        ("training, states computed", "100", "0.50"),
        ("training, states kept", "500", "2.50"),
    ]
    assert lines[5].endswith("is target 80.0%, batch 5.0%, forward 7.5%, backward 5.0%, optimiser 2.5%")


def test_what_is_timed_is_what_is_trained_on(work: SimpleNamespace):
    clock = Clock(torch.device("cpu"))
    timed = TimedFeatures(work, clock)  # type: ignore[arg-type]
    clock.start()
    batch, plain = timed.batch([2, 0]), OnlineFeatures(work.target, work.samples, 2**30, (1,)).batch([2, 0])
    for name in ("token_ids", "loss_mask", "hidden", "features"):
        assert torch.equal(vars(batch)[name], vars(plain)[name])
    timed.batch([2, 0])
    assert timed.target_tokens == 2 * (7 + 5)  # nothing is kept
    assert clock.spent["target"] == pytest.approx(timed.target_seconds)
    assert min(clock.spent.values()) > 0
    assert set(clock.spent) == {"target", "batch", "backward"}


@pytest.mark.parametrize("kind", ["medusa", "medusa2"])
def test_a_command_times_the_steps_of_a_run_and_makes_none(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
):
    monkeypatch.setattr(throughput, "SECONDS", 0.0)
    folder = launch(f"--head.type={kind}", "--optim.accumulation=2", "--throughput")
    out = capsys.readouterr().out
    assert f"throughput: {throughput.LEAST} steps of 4 conversations, " in out
    assert f"; {kind} on " in out
    kept = re.search(r"states kept +([\d,]+) tokens/s", out)
    computed = re.search(r"states computed +([\d,]+) tokens/s", out)
    assert kept
    assert computed
    assert int(kept[1].replace(",", "")) > int(computed[1].replace(",", "")) > 0
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", out.rpartition("throughput:")[2])]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert min(shares) > 0
    assert not folder.exists()


def test_a_short_run_is_not_timed_for_longer_than_it_is(launch: Launch, capsys: pytest.CaptureFixture[str]):
    launch("--throughput")  # which would take half a minute
    assert "throughput: 7 steps of 4 conversations, " in capsys.readouterr().out


def test_two_rehearsals_at_once_are_refused(launch: Launch):
    with pytest.raises(SystemExit, match="--throughput and --plan are two commands; give one"):
        launch("--throughput", "--plan")
