"""Runs that start from trained heads."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from heads import read_notes
from train import draft_model, eagle

Launch = Callable[..., Path]
STILL = ("--optim.steps=1", "--optim.lr=1e-12", "--optim.weight_decay=0")


@pytest.fixture
def launch_with(config_file: Path, fresh_accelerate: None) -> Callable[..., Path]:
    """Run the command line of another trainer, with `head` as the config's section."""

    def launch(main: Callable[[list[str]], None], head: dict[str, object], *arguments: str) -> Path:
        config = yaml.safe_load(config_file.read_text())
        path = config_file.with_name("other.yaml")
        path.write_text(yaml.safe_dump({**config, "head": head}))
        AcceleratorState._reset_state(True)
        main(["--config", str(path), *arguments])
        name = next(word.partition("=")[2] for word in arguments if word.startswith("--run.name="))
        return config_file.parent / "runs" / name

    return launch


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "last" / "model.safetensors")


def test_weights_and_draft_vocabulary_are_taken_over(launch: Launch, capsys: pytest.CaptureFixture[str]):
    first = launch("--run.name=first")
    # of two conversations other tokens would be chosen, and other losses do not make another head
    others = ("--data.limit=2", "--optim.batch_size=2", '--head.losses={"ce": 1}', "--head.depth_decay=1")
    found = weights(launch("--run.name=second", f"--run.init={first / 'last'}", *others, *STILL))
    before = weights(first)
    assert before["blocks.0.0.linear.weight"].abs().max() > 0.01
    assert torch.equal(found["vocabulary"], before["vocabulary"])
    for name in before:
        torch.testing.assert_close(found[name], before[name], atol=1e-8, rtol=0)
    assert f"the head starts from {first / 'last'}" in capsys.readouterr().out
    assert read_notes(first.with_name("second") / "last").training["init"] == str(first / "last")
    assert "init" not in read_notes(first / "last").training


def test_a_continued_run_does_not_start_again(launch: Launch):
    first = launch("--run.name=first")
    init = (f"--run.init={first / 'last'}", "--optim.schedule=constant")
    whole = weights(launch("--run.name=whole", *init, "--optim.steps=4"))
    launch("--run.name=cut", *init, "--optim.steps=2")
    first.rename(first.with_name("gone"))
    cut = weights(launch("--run.name=cut", *init, "--optim.steps=4"))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_a_head_of_another_kind_or_size_is_refused_before_anything_is_trained(launch: Launch):
    first = launch("--run.name=first")
    init = f"--run.init={first / 'last'}"
    wrong = {
        ("--head.type=hydra", "--head.num_heads=2"): r"it holds a head of type medusa, and head\.type is hydra",
        ("--head.num_heads=3",): r"its weights are not those that head\.\* asks for: missing \['blocks\.2\.0",
        ("--head.draft_vocab_size=32",): r"asks for: .*vocabulary: \(64,\) instead of \(32,\)",
    }
    for arguments, message in wrong.items():
        with pytest.raises(SystemExit, match=rf"error: run\.init=.*{message}.*; give the folder of a head"):
            launch("--run.name=other", init, *arguments)
    assert not list((first.parent / "other" / "checkpoints").iterdir())


def test_weights_that_mean_something_else_are_refused(launch_with: Callable[..., Path]):
    head = {"type": "eagle3", "feature_layers": [1], "draft_vocab_size": 64}
    first = launch_with(eagle.main, head, "--run.name=first", *STILL)
    init = f"--run.init={first / 'last'}"
    with pytest.raises(SystemExit, match=r"something else: head\.norm_before_residual is True and was False; give"):
        launch_with(eagle.main, {**head, "norm_before_residual": True}, init, "--run.name=other", *STILL)
    launch_with(eagle.main, {**head, "unroll": 1, "activation_checkpointing": True}, init, "--run.name=other", *STILL)


def test_a_draft_model_does_not_start_from_another(launch_with: Callable[..., Path]):
    with pytest.raises(SystemExit, match=r"run\.init=somewhere: only heads start from others; leave it out"):
        launch_with(draft_model.main, {"width": 16}, "--run.name=draft", "--run.init=somewhere")
