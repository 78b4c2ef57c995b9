"""The contract that every head keeps: which heads there are, and how to build and run a small one of each kind."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import heads
from decode import Target
from heads import FeatureBatch, Head, create_head, head_class
from train.new_head import target_sizes

FILES = sorted(path.stem for path in Path(heads.__file__).parent.glob("*.py"))
KINDS = [name for name in FILES if "HEAD" in vars(importlib.import_module(f"heads.{name}"))]
VOCABULARY = torch.tensor([1, *range(20, 320, 7)])


@dataclass(frozen=True)
class Variant:
    """Options of a small head; a kind that has none here is tested with its defaults."""

    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.02
    """With which it learns a batch by heart."""
    tokens_only: Mapping[str, Any] = field(default_factory=dict)
    """Options that switch off what is no loss over tokens."""


VARIANTS: dict[str, dict[str, Variant]] = {
    "medusa": {
        "medusa": Variant({"num_heads": 3}),
        "medusa-own": Variant({"num_heads": 3, "num_layers": 2, "own_lm_head": True}),
    },
    "hydra": {
        "hydra": Variant({"num_heads": 3, "num_layers": 2}),
        "hydra-prefix": Variant({"num_heads": 3, "prefix_layer": True}),
    },
    "eagle": {
        "eagle": Variant({"max_depth": 3}, tokens_only={"feature_weight": 0.0}),
        "eagle-unrolled": Variant({"max_depth": 4, "unroll": 3}, tokens_only={"feature_weight": 0.0}),
        "eagle-bias": Variant({"max_depth": 3, "fc_bias": True}, tokens_only={"feature_weight": 0.0}),
    },
    "eagle3": {
        "eagle3": Variant({"max_depth": 4, "unroll": 3, "feature_layers": (1, 2)}),
        "eagle3-shared": Variant({"max_depth": 3, "unroll": 2, "feature_layers": (2,), "own_lm_head": False}),
        "eagle3-normed": Variant(
            {"max_depth": 3, "unroll": 2, "feature_layers": (1, 2), "norm_before_residual": True}, lr=0.01
        ),
    },
}
CASES = [(kind, name) for kind in KINDS for name in VARIANTS.get(kind, {kind: Variant()})]


@dataclass(frozen=True)
class Case:
    """One variant on the float64 target."""

    kind: str
    variant: Variant
    target: Target

    def head(
        self, *, vocabulary: torch.Tensor | None = None, tokens_only: bool = False, random: bool = True, **options: Any
    ) -> Head:
        """A float64 head in evaluation mode (training adds noise to some), its weights moved at random."""
        torch.manual_seed(1)
        config = head_class(self.kind).Config
        extra = dict(self.variant.tokens_only) if tokens_only else {}
        size = None if vocabulary is None else len(vocabulary)
        fields = {**self.variant.options, **extra, **options, "draft_vocab_size": size}
        head = create_head(self.kind, config(**fields, **target_sizes(self.target, config)), self.target)
        if vocabulary is not None:
            head.set_vocabulary(vocabulary)
        if random:
            for parameter in head.parameters():
                parameter.data += torch.randn_like(parameter) * 0.05
        return head.double().eval()

    def batch(self, head: Head, lengths: Sequence[int], *, seed: int = 0) -> FeatureBatch:
        """Random text of the head's vocabulary, all of it supervised, the target's states, and padding of zeros."""
        generator = torch.Generator().manual_seed(seed)
        choice = torch.arange(self.target.vocab_size) if head.vocabulary is None else head.vocabulary
        ids = choice[torch.randint(0, len(choice), (len(lengths), max(lengths)), generator=generator)]
        return self.encode(head, ids, lengths)

    def encode(self, head: Head, ids: torch.Tensor, lengths: Sequence[int]) -> FeatureBatch:
        """The batch of a text [B, T]."""
        real = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        hidden, features = self.target.encode_features(ids * real, lengths, head.feature_layers)
        features = None if features is None else features * real[..., None]
        return FeatureBatch(ids * real, real, hidden * real[..., None], features)

    def losses(self, head: Head, batch: FeatureBatch) -> list[tuple[float, int]]:
        """Sum and count of the token loss at each depth that is trained."""
        metrics = head(batch).metrics
        depths = sum(name.startswith("depth") and name.endswith("/loss") for name in metrics)
        assert depths >= 1
        pairs = [metrics[f"depth{depth + 1}/loss"].tolist() for depth in range(depths)]
        return [(total, int(count)) for total, count in pairs]

    def draft(self, head: Head, batch: FeatureBatch, roots: Sequence[int], depth: int) -> torch.Tensor:
        """[B, depth, U] logits along the text behind each row's root, from one sync over the text before it."""
        drafter = head.drafter()
        longest = max(roots)
        features = None if batch.features is None else batch.features[:, :longest]
        levels = [drafter.sync(batch.token_ids[:, : longest + 1], batch.hidden[:, :longest], list(roots), features)]
        for level in range(1, depth):
            tokens = torch.stack([batch.token_ids[row, root + level] for row, root in enumerate(roots)])
            levels.append(drafter.extend(tokens[:, None], torch.full((len(roots), 1), level - 1))[:, 0])
        return torch.stack(levels, dim=1)

    def cut(self, batch: FeatureBatch, rows: Sequence[int], columns: slice) -> FeatureBatch:
        """Some rows and places of a batch."""
        parts = (batch.token_ids, batch.loss_mask, batch.hidden, batch.features)
        return FeatureBatch(*(None if part is None else part[list(rows), columns] for part in parts))

    def column(self, head: Head, token: int) -> int:
        """The logit column of a token."""
        return token if head.vocabulary is None else head.vocabulary.tolist().index(token)


@pytest.fixture(scope="session", params=CASES, ids=[name for _, name in CASES])
def case(request: pytest.FixtureRequest, tiny_target: Target) -> Case:
    """Each variant of each kind of head."""
    kind, name = request.param
    return Case(kind, VARIANTS.get(kind, {}).get(name, Variant()), tiny_target)


@pytest.fixture(params=[None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
def vocabulary(request: pytest.FixtureRequest) -> torch.Tensor | None:
    """No draft vocabulary and one."""
    return request.param
