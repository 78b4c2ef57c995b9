"""Typical acceptance: faster, and NOT exact. The text is no longer distributed as the target's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.accept import Randomness, Verdict
from decode.tree import TokenTree


@dataclass(frozen=True)
class Typical:
    """Keep drafts the target finds plausible: p(x) > min(epsilon, delta * exp(-entropy of p)). NOT exact.

    Medusa's acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.1). The longest kept path wins, among equals the
    likelier; the target's own choice follows it. At temperature 0 only the target's best token passes, so the text is
    that of greedy decoding.
    """

    epsilon: float = 0.09
    """A token this likely is always kept (the paper's setting)."""
    delta: float = 0.3
    """Scale of the bound where the target is unsure."""
    exact: bool = field(default=False, init=False)
    shares_noise: bool = field(default=False, init=False)
    in_order: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Reject bounds that no probability is measured by."""
        if not 0 < self.epsilon < 1 or not self.delta > 0:
            raise ValueError(
                f"typical acceptance needs 0 < epsilon < 1 and delta > 0, got {self.epsilon} and {self.delta}"
            )

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows; see `decode.accept.AcceptRule`."""
        return [self._walk(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]

    def _walk(self, tree: TokenTree, logits: Tensor, row: Randomness) -> Verdict:
        tokens = tree.token_ids.tolist()
        paths: dict[int, tuple[int, ...]] = {0: (0,)}  # kept nodes
        likely = {0: 0.0}  # log-probability of each kept path
        for node, children in enumerate(tree.shape.children):  # parents come first
            if node not in paths or not children:
                continue
            path = paths[node]
            p = row.probs(logits[node], [tokens[n] for n in path[1:]])
            bound = min(self.epsilon, self.delta * math.exp(-float(torch.special.entr(p).sum())))
            for child in children:
                probability = float(p[tokens[child]])
                if probability > bound:
                    paths[child] = (*path, child)
                    likely[child] = likely[node] + math.log(probability)
        best = max(paths, key=lambda node: (len(paths[node]), likely[node]))
        path = paths[best]
        return Verdict.of(tokens, path, row.choose(logits[best], [tokens[n] for n in path[1:]]))
