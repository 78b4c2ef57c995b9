"""A run of train/medusa.py with Hydra heads: it learns, is saved as what it is, and is not continued as another."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from decode import Target, generate
from heads import load_head, read_notes

HYDRA = ("--head.type=hydra", "--head.prefix_layer=true", "--head.num_layers=2")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_hydra_heads_are_trained_saved_and_decoded_with(
    launch: Callable[..., Path], read_metrics, target_folder: Path, precision: str
):
    folder = launch(*HYDRA, "--optim.steps=12", "--eval.num_prompts=2", f"--precision={precision}")
    lines = read_metrics(folder)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    assert {"train/depth1/top1", "train/depth2/loss"} <= lines[0].keys()
    assert lines[-1]["eval/tokens_per_step"] >= 1
    assert yaml.safe_load((folder / "run.yaml").read_text())["head"]["type"] == "hydra"
    target = Target.from_pretrained(str(target_folder), dtype="float32")
    head = load_head(folder / "best", target)
    assert head.kind == "hydra"
    assert (head.config.prefix_layer, head.config.intermediate_size, head.config.head_dim) == (True, 32, 8)
    assert len(head.vocabulary) == 64
    assert read_notes(folder / "best").measured
    prompts = [[40, 41, 42], [7, 8]]
    options = {"max_new_tokens": 10, "eos_ids": ()}
    drafted = generate(target, prompts, head=head, check=True, **options)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in generate(target, prompts, **options)]


def test_a_run_is_not_continued_with_another_type_of_head(launch: Callable[..., Path]):
    launch("--head.type=hydra", "--optim.steps=3")
    with pytest.raises(SystemExit, match=r"holds a run with another config:\n(.*\n)*  head.type: 'hydra' -> 'medusa'"):
        launch("--optim.steps=3")
    launch("--head.type=hydra", "--optim.steps=4")
