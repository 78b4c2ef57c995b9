"""What cannot be predicted stops no run, and leaves no trace in it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch._subclasses import FakeTensor

from data.conversations import Encoded
from decode import Target
from heads.base import FeatureBatch, HeadOutput
from heads.medusa import MedusaConfig, MedusaHead
from train import memory_plan, plan
from train.imagined import UnpredictableError, step_bytes
from train.memory_plan import Memory, Work, plan_memory

Launch = Callable[..., Path]
UNKNOWN = r"plan: the memory of a step of {} heads cannot be predicted \({}"
WEIGHTS = 320 * 16 * 2 + 16 * 16 * 4 + 3 * 16 * 32 + 3 * 16
"""Of the target."""


def branches(hidden: torch.Tensor) -> None:
    if float(hidden.abs().max()) > 1e9:
        raise ValueError("too large")


def asserts(hidden: torch.Tensor) -> None:
    assert not isinstance(hidden, FakeTensor)


def leaves_torch(hidden: torch.Tensor) -> None:
    torch.from_numpy(hidden.detach().numpy())


@pytest.mark.parametrize(
    ("look", "reason"), [(branches, "DataDependentOutput"), (asserts, "AssertionError"), (leaves_torch, r"\w+Error")]
)
def test_a_head_that_cannot_be_imagined_trains_as_ever(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], look, reason: str
):
    plain = launch("--run.name=plain", "--optim.steps=3")
    assert "cannot be predicted" not in capsys.readouterr().out
    forward = MedusaHead.forward

    def looking(head: MedusaHead, batch: FeatureBatch) -> HeadOutput:
        look(batch.hidden)
        return forward(head, batch)

    monkeypatch.setattr(MedusaHead, "forward", looking)
    odd = launch("--run.name=odd", "--optim.steps=3")
    assert re.search(UNKNOWN.format("medusa", reason), capsys.readouterr().out)
    assert (odd / "last/model.safetensors").read_bytes() == (plain / "last/model.safetensors").read_bytes()
    launch("--run.name=only", "--plan")
    output = capsys.readouterr().out
    assert re.search(UNKNOWN.format("medusa", reason), output)
    assert re.search(r"plan: [\d,]+ tokens per second", output)
    assert "plan: memory" not in output


def test_heads_with_an_adapter_have_a_plan_without_memory(launch: Launch, capsys: pytest.CaptureFixture[str]):
    launch("--head.type=medusa2", "--head.rank=4", "--plan")
    output = capsys.readouterr().out
    assert re.search(UNKNOWN.format("medusa2", "they train layers inside the target"), output)
    assert re.search(r"plan: [\d,]+ tokens per second", output)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_a_launch_that_spreads_a_step_is_not_predicted(kind: DistributedType):
    config = SimpleNamespace(head_type="medusa", target=SimpleNamespace(device_map=None, shard=False))
    assert f"{kind.value} spreads" in plan._unpredictable(SimpleNamespace(distributed_type=kind), config)
    assert plan._unpredictable(SimpleNamespace(distributed_type=DistributedType.MULTI_GPU), config) is None


def test_a_target_that_cannot_be_counted_is_no_obstacle(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*arguments: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(memory_plan, "compute_states", fail)
    launch("--optim.steps=1")
    output = capsys.readouterr().out
    assert re.search(UNKNOWN.format("medusa", r"NotImplementedError\)"), output)
    assert "is finished" in output


class Restless(MedusaHead):
    """Counts its forwards, draws random numbers, and uses its parameters beside those it is given."""

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        super().__init__(config, target)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()))
        self.own = list(self.parameters())

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        self.forwards += 1
        self.scale *= 2
        torch.rand(3)
        output = super().forward(batch)
        return HeadOutput(output.loss + sum(parameter.sum() for parameter in self.own), output.metrics)


@pytest.mark.parametrize("fails", [False, True])
def test_imagining_changes_neither_buffers_nor_gradients_nor_random_numbers(
    make_tiny_llama, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    target = Target(make_tiny_llama(dtype=torch.float32), name="tiny")
    head = Restless(MedusaConfig(hidden_size=32, vocab_size=320, num_heads=2), target)
    samples, state = [Encoded(list(range(5, 25)), [True] * 20)], torch.get_rng_state()
    arguments = (head, samples, torch.float32)
    if fails:
        monkeypatch.setattr("train.imagined.functional_call", lambda *given: branches(given[2][0].hidden))
        with pytest.raises(UnpredictableError):
            step_bytes(*arguments, passes=2, bf16=False)
    else:
        assert step_bytes(*arguments, passes=2, bf16=False)[0] > 0
    assert (int(head.forwards), float(head.scale)) == (0, 1.0)
    assert all(parameter.grad is None for parameter in head.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_change_whose_step_cannot_be_predicted_is_no_way_out(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    def predict(work: Work, *arguments: object, **named: object) -> list[Memory]:
        if work.config.optim.accumulation > 1:
            raise UnpredictableError("not this one")
        memory = plan_memory(work, *arguments, **named)
        fits = work.config.head["chunk_size"] == 32
        return [Memory(part.place, part.parts, part.held, part.added - (0 if fits else 1)) for part in memory]

    monkeypatch.setattr(plan, "plan_memory", predict)
    with pytest.raises(SystemExit, match=r"Any one of these makes it fit:\n  --head\.chunk_size=32: [^\n]*$"):
        launch("--head.chunk_size=64")


def test_a_target_whose_weights_cannot_be_counted_is_loaded(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object, **named: object) -> None:
        raise NotImplementedError("no numbers on meta")

    monkeypatch.setattr(plan, "free_memory", lambda: 1)
    with pytest.raises(SystemExit, match="while they are loaded"):
        launch("--optim.steps=1")
    monkeypatch.setattr(plan.AutoModelForCausalLM, "from_config", fail)
    launch("--optim.steps=1")


def test_a_target_that_is_not_packed_is_loaded_once(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "free_memory", lambda: 4 * WEIGHTS)
    launch("--head.type=medusa2", "--plan")
    with pytest.raises(SystemExit, match=f"has {WEIGHTS:,} weights"):
        launch("--plan")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "of-its-own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}},
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model_type": "bert", "hidden_size": -3},
    ],
)
def test_weights_are_counted_only_of_models_that_are_plain(tmp_path: Path, target_folder: Path, changes: dict):
    assert sum(part.numel() for part in plan.without_weights(str(target_folder)).parameters()) == WEIGHTS
    config = json.loads((target_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "own.py").write_text("raise SystemError('run without being asked')")
    assert plan.without_weights(str(tmp_path)) is None
    assert plan.without_weights(str(tmp_path / "missing")) is None


def test_a_target_that_is_not_there_is_refused_as_before(launch: Launch, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="is not a model folder: it has no config"):
        launch(f"--target.name={tmp_path / 'empty'}", "--plan")
