"""Medusa-2 (Cai et al. 2024, arXiv:2401.10774, section 3): Medusa heads trained jointly with an adapter on the target.

The loss is `base + c * heads`. `heads` is the heads' loss on the adapted target's states; its gradient reaches the
adapter, which learns states that say more of what comes. `base` holds the adapted target to the original one, whose
states are the run's features: its own distribution is the teacher (self-distillation). `c` rises along a sine, so that
untrained heads do not pull the target away.

What comes out drafts for the adapted target, and is exact for that; how far that is from the original, `train.drift`
measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.conversations import Encoded
from decode import Target
from heads.base import FeatureBatch, HeadOutput
from heads.checkpoint import HeadNotes, save_head
from heads.losses import check_losses, vocabulary_loss
from heads.medusa import MedusaConfig, MedusaHead
from train.adapter import FOLDER, Adapter
from train.config import ConfigError, RunConfig, naming, require
from train.model_folder import replace_folder
from train.new_head import choose_vocabulary, new_head


@dataclass(frozen=True, kw_only=True)
class Medusa2Config(MedusaConfig):
    """Medusa heads, and the adapter that is trained with them. optim.lr is the heads'."""

    rank: int = 32
    """Width of the adapter's layers."""
    alpha: int = 16
    """The output of the adapter's layers is scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of the adapter's inputs that is dropped in training."""
    modules: tuple[str, ...] | None = None
    """Linear layers of the target to adapt, such as [q_proj, v_proj]; null: all but the lm_head."""
    base_losses: Mapping[str, float] = field(default_factory=lambda: {"kl": 1.0})
    """Weights of the losses that hold the adapted target to the original; see `heads.objectives`."""
    head_weight: float = 0.05
    """Weight of the heads' loss beside that of base_losses, at its peak."""
    head_warmup: float = 1.0
    """Share of the run over which head_weight rises to its peak, along a sine."""
    adapter_lr: float = 0.25
    """Learning rate of the adapter, as a share of optim.lr."""
    max_drift: float = 0.1
    """Warn where an evaluation finds the adapted target further than this from the original: nats of KL divergence a
    token."""

    def __post_init__(self) -> None:
        """Reject what makes no heads or no adapter."""
        super().__post_init__()
        self.check_at_least(1, "rank", "alpha")
        require(self.modules is None or len(self.modules) > 0, "head.modules is empty; name layers, or null for all")
        require(0 <= self.dropout < 1, f"head.dropout must be at least 0 and below 1, got {self.dropout}")
        require(0 <= self.head_warmup <= 1, f"head.head_warmup must be between 0 and 1, got {self.head_warmup}")
        for name in ("head_weight", "adapter_lr", "max_drift"):
            value = vars(self)[name]
            require(0 < value < math.inf, f"head.{name} must be a number above 0, got {value}")
        with naming("head.base_losses", "see heads/objectives.py", ValueError):
            check_losses(self.base_losses)

    def of_the_heads(self) -> MedusaConfig:
        """Return what remains when the training is over."""
        return MedusaConfig(**{item.name: vars(self)[item.name] for item in fields(MedusaConfig)})

    def of_the_training(self) -> dict[str, Any]:
        """Return what does not."""
        return {name: value for name, value in asdict(self).items() if name not in asdict(self.of_the_heads())}


class Medusa2InTraining(MedusaHead):
    """Medusa heads that own the weights of an adapter in their target; they are saved as plain heads beside it."""

    Config = Medusa2Config
    kind = "medusa2"
    config: Medusa2Config
    forwards: Tensor

    def __init__(self, config: Medusa2Config, target: Target) -> None:
        super().__init__(config, target)
        if not target.plain_logits:
            raise ConfigError(
                f"{target.name} scales or caps its logits behind the lm_head, so its distribution does not follow from "
                "its states, and an adapter cannot be held to it; train --head.type=medusa --head.losses='{\"ce\": 1}'"
            )
        names = ("rank", "alpha", "dropout", "modules")
        self.adapter = Adapter(target, **{name: vars(config)[name] for name in names})
        # module names hold dots, which parameters' must not
        self.adapted = nn.ParameterDict({key.replace(".", "/"): p for key, p in self.adapter.parameters.items()})
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))  # a resumed run goes on with the schedule
        self.total_steps, self.accumulation = 1, 1
        """Of the run, in which each step is `accumulation` forwards; the trainer knows both."""

    def learning_rates(self) -> Mapping[float, Sequence[nn.Parameter]]:
        """Return the heads' parameters and the adapter's by their shares of the learning rate."""
        heads = [parameter for name, parameter in self.named_parameters() if not name.startswith("adapted.")]
        groups: dict[float, list[nn.Parameter]] = {1.0: heads}
        groups.setdefault(self.config.adapter_lr, []).extend(self.adapted.values())
        return groups

    def head_weight(self) -> float:
        """Return the weight of the heads' loss in the step that the next training forward is part of."""
        step = int(self.forwards) // self.accumulation + 1
        rise = max(1.0, self.config.head_warmup * self.total_steps)
        return self.config.head_weight * math.sin(math.pi / 2 * min(1.0, step / rise))

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the joint loss, summed over supervised tokens; `batch.hidden` is the original target's."""
        states = self.adapter.states(batch.token_ids, training=self.training).to(batch.hidden.dtype)
        base = self._base_loss(batch, states)
        heads = super().forward(replace(batch, hidden=states))
        weight = self.head_weight()
        if self.training:
            self.forwards += 1
        shown = {"head_weight": base.loss.new_tensor([weight, 1.0])}
        return HeadOutput(base.loss + weight * heads.loss, {**base.metrics, **heads.metrics, **shown})

    def _base_loss(self, batch: FeatureBatch, states: Tensor) -> HeadOutput:
        """Return the loss of the adapted target's own predictions, [B, T, D], and how often they are the label."""
        mask = batch.loss_mask.clone()
        mask[:, 0] = False  # nothing stands before it
        rows, positions = mask.nonzero(as_tuple=True)
        weight = self.lm_head.get_parameter("weight").detach().to(states.dtype)
        loss, terms, correct, _ = vocabulary_loss(
            states[rows, positions - 1][:, None],
            weight,
            batch.token_ids[rows, positions],
            batch.hidden[rows, positions - 1],
            weight,
            states.new_ones(len(rows), 1),
            losses=self.config.base_losses,
            chunk_size=self.config.chunk_size,
        )
        sums = {"base/loss": terms.sum(), "base/top1": correct.sum().to(terms.dtype)}
        count = terms.new_tensor(len(rows))
        return HeadOutput(loss, {name: torch.stack([total, count]) for name, total in sums.items()})

    def heads(self, target: Target) -> MedusaHead:
        """Return a copy without the adapter."""
        with torch.random.fork_rng():  # new weights draw random numbers, which are the run's
            plain = MedusaHead(self.config.of_the_heads(), target).to(target.device, self.dtype)
        wanted, state = plain.state_dict(), self.state_dict()
        plain.load_state_dict({name: state[name] for name in wanted})
        plain.tree = self.tree
        return plain


def build_joint(
    config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]
) -> Medusa2InTraining:
    """Return untrained heads with an untrained adapter."""
    head = new_head(Medusa2InTraining, config, target)
    choose_vocabulary(head, config, target, samples, say)
    head.total_steps, head.accumulation = config.optim.total_steps(len(samples)), config.optim.accumulation
    return head


def save_joint(head: Medusa2InTraining, path: Path, *, target: Target, notes: HeadNotes) -> None:
    """Write plain Medusa heads of the adapted target to the folder `path`, and the adapter to `adapter/` in it."""
    training = {**notes.training, "joint": head.config.of_the_training()}

    def write(new: Path) -> None:
        save_head(head.heads(target), new, target=head.adapter.lender(), notes=replace(notes, training=training))
        head.adapter.save(new / FOLDER)

    replace_folder(path, write)
