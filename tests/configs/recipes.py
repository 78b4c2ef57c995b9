"""`python -m tests.configs.recipes`: the table of recipes in configs/README.md, and what the tests hold them against.

Nothing is computed: targets and heads are built on the meta device, in the shapes of tests/assets/targets.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data.features import bytes_per_token
from decode import Target
from heads import Head, head_class
from train import eagle, medusa
from train.command_line import load_config
from train.config import RunConfig
from train.new_head import new_head

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "tests" / "assets" / "targets"
HEADS = {**medusa.HEADS, **eagle.HEADS}
NAMES = {"medusa": "Medusa", "eagle3": "EAGLE-3"}
RUN = ("smollm2-135m",)
"""Targets whose recipes were run."""


class ShapeTarget(Target):
    """A target without weights: it says its sizes and lends modules of its shapes, and cannot be asked for a state."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name, self.plain_logits = model, name, True
        self._config = model.config.get_text_config()


@cache
def shape_target(name: str) -> ShapeTarget:
    """Return the target of tests/assets/targets/<name>.json."""
    config = AutoConfig.for_model(**json.loads((SHAPES / f"{name}.json").read_text()))
    with torch.device("meta"):
        return ShapeTarget(AutoModelForCausalLM.from_config(config), name)


@dataclass(frozen=True)
class Recipe:
    """A file of configs/, on the shapes of its target."""

    path: Path

    @cached_property
    def config(self) -> RunConfig:
        return load_config(HEADS, ["--config", str(self.path)], "")

    @property
    def target(self) -> ShapeTarget:
        return shape_target(self.path.stem)

    @cached_property
    def head(self) -> Head:
        config, target = self.config, self.target
        if config.head_type == "eagle3" and not config.head["feature_layers"]:
            config = replace(config, head={**config.head, "feature_layers": eagle.default_layers(target)})
        with torch.device("meta"):
            return new_head(head_class(config.head_type), config, target)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.head.parameters())

    @property
    def memory(self) -> int:
        """Bytes of the target's weights, and of the head's, their gradients and AdamW's two moments, in float32."""
        weights = sum(parameter.numel() for parameter in self.target.model.parameters())
        return weights * self.dtype.itemsize + 4 * self.parameters * torch.float32.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.target.dtype)

    @property
    def state_size(self) -> int:
        return bytes_per_token(self.target.hidden_size, self.head.feature_layers, self.dtype)

    @property
    def answers(self) -> int:
        """How many to train on, by the file."""
        (found,) = re.findall(r"^# Budget: ([\d,]+) answers", self.path.read_text(), re.MULTILINE)
        return int(found.replace(",", ""))

    @property
    def steps(self) -> int:
        return self.config.optim.total_steps(self.answers)

    def numbers(self) -> list[str]:
        """Return the lines that must stand at the top of the file."""
        optim, held_out = self.config.optim, self.config.eval.num_prompts
        tokens = self.steps * optim.batch_size * self.config.data.max_length
        return [
            f"# {self.parameters:,} trained parameters, {self.state_size:,} bytes of states for each token.",
            f"# Weights, gradients and moments: {gib(self.memory)}; activations come on top, --plan prints them.",
            f"# Budget: {self.answers:,} answers, {held_out} more held out, {optim.epochs:g} epochs: "
            f"{self.steps:,} steps of {optim.batch_size}, {tokens:,} tokens at most.",
        ]

    def row(self) -> str:
        """Return its row of the table."""
        cells = [
            self.config.target.name.rpartition("/")[2],
            f"[{NAMES[self.config.head_type]}]({self.path.relative_to(ROOT / 'configs')})",
            f"{self.parameters:,}",
            gib(self.memory),
            f"{self.state_size:,}",
            f"{self.steps:,} x {self.config.optim.batch_size}",
            "yes, above" if self.path.stem in RUN else "no",
        ]
        return f"| {' | '.join(cells)} |"


def gib(count: int) -> str:
    """Return bytes for people."""
    return f"{count / 2**30:.2f} GiB"


def recipes() -> Iterator[Recipe]:
    """Yield those of all targets whose shapes are known, small ones first."""
    names = [path.stem for path in SHAPES.glob("*.json")]
    names.sort(key=lambda name: sum(parameter.numel() for parameter in shape_target(name).model.parameters()))
    for name in names:
        yield from (Recipe(ROOT / "configs" / kind / f"{name}.yaml") for kind in NAMES)


def table() -> str:
    """Return the table of configs/README.md."""
    titles = ["target", "head", "trained parameters", "weights, gradients, moments", "bytes of states per token"]
    head = [f"| {' | '.join([*titles, 'steps x batch', 'run'])} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(recipe.row() for recipe in recipes())])


if __name__ == "__main__":
    print(table())
