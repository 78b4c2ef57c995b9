"""What a head can be taught at one position: losses between its distribution and the target's, with their gradients.

`q` is the head's distribution over the draft vocabulary and `p` the target's at the same position, renormalised over
the draft vocabulary, both at temperature 1. Every objective is a function from a `Chunk` of positions to a `Part`: its
terms, and the two pieces that their gradient with respect to the head's logits is made of. `mix` adds the parts up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LOG_FLOOR = -80.0
"""Probabilities of the target below exp(-80) count as that: a token that it rules out costs a finite amount, and no
quotient overflows, as exp(-80) and its inverse are normal float32 numbers."""
TOP_K = 10
"""Tokens of the target that "top_k" looks at (Zhang et al. 2024, arXiv:2408.15766)."""


class Teacher:
    """The target's distribution at c positions."""

    def __init__(self, logits: Tensor) -> None:
        """Normalise [c, U] logits."""
        self.log_p = F.log_softmax(logits, dim=-1).clamp_(min=LOG_FLOOR)
        """[c, U], at least LOG_FLOOR."""
        self.p = F.softmax(logits, dim=-1).clamp_(min=math.exp(LOG_FLOOR))
        """[c, U]."""


class Chunk:
    """What the K heads and the target say at c positions."""

    def __init__(
        self, logits: Tensor, labels: Tensor, teacher: Teacher | None, memory: Sequence[Tensor] | None = None
    ) -> None:
        """Normalise the logits of the heads.

        Args:
            logits: [c, K, U], whose memory is computed in.
            labels: [c] columns of the true tokens.
            teacher: The target at the same positions, where an objective needs it.
            memory: Two tensors [c, K, U] to keep log q and q in, which chunks may use in turn; None for new ones, whose
                first touch costs more than a pass over old ones.
        """
        memory = [torch.empty_like(logits) for _ in range(2)] if memory is None else memory
        self.labels = labels
        self.log_q = torch.log_softmax(logits, dim=-1, out=memory[0])
        """[c, K, U], finite where the logits are."""
        self.q = torch.softmax(logits, dim=-1, out=memory[1])  # faster than exp(log_q)
        """[c, K, U]."""
        self.teacher = teacher
        self._scratch = logits
        self.overlap = None
        if teacher is not None:
            self.overlap = torch.minimum(self.q, teacher.p[:, None], out=self._scratch).sum(-1).clamp_(max=1)
        """[c, K] sum of min(p, q): how likely speculative sampling keeps a token drawn from q (Leviathan et al. 2023,
        arXiv:2211.17192, theorem 3.5). Above 0, because p is."""

    def sum_product(self, a: Tensor, b: Tensor) -> Tensor:
        """[c, K, U], or what broadcasts to it, twice -> [c, K]; 3 times as fast as einsum's matrix-vector products."""
        return torch.mul(a, b, out=self._scratch).sum(-1)

    def taught(self) -> tuple[Teacher, Tensor]:
        """Return the teacher and the overlap, where an objective cannot do without."""
        if self.teacher is None or self.overlap is None:
            raise ValueError("this objective compares with the target's distribution, and the chunk has none")
        return self.teacher, self.overlap


@dataclass(frozen=True)
class Part:
    """Terms of one objective, and their gradient `sum(t) q - t + q (s - sum(q s))` with respect to the logits."""

    terms: Tensor
    """[c, K]."""
    targets: Tensor | None = None
    """t, [c, U]: minus the derivative by log q, of terms that are linear in log q, the same way for all heads."""
    slope: Tensor | None = None
    """s, [c, K, U]: the derivative by q, up to a constant for each distribution."""


def cross_entropy(chunk: Chunk) -> Part:
    """-log q(label)."""
    index = chunk.labels[:, None, None].expand(-1, chunk.log_q.shape[1], 1)
    targets = torch.zeros_like(chunk.log_q[:, 0]).scatter_(-1, chunk.labels[:, None], 1)
    return Part(-chunk.log_q.gather(-1, index).squeeze(-1), targets=targets)


def forward_kl(chunk: Chunk) -> Part:
    """KL(p || q) (Hinton et al. 2015, arXiv:1503.02531, temperature 1)."""
    teacher, _ = chunk.taught()
    negative_entropy = (teacher.p * teacher.log_p).sum(-1, keepdim=True)
    return Part(negative_entropy - chunk.sum_product(chunk.log_q, teacher.p[:, None]), targets=teacher.p)


def top_k(chunk: Chunk) -> Part:
    """Return -sum p log q over the target's TOP_K most likely tokens (Zhang et al. 2024, arXiv:2408.15766)."""
    teacher, _ = chunk.taught()
    values, columns = teacher.p.topk(min(TOP_K, teacher.p.shape[-1]), dim=-1)
    found = chunk.log_q.gather(-1, columns[:, None].expand(-1, chunk.log_q.shape[1], -1))
    targets = torch.zeros_like(teacher.p).scatter_(-1, columns, values)
    return Part(-(found * values[:, None]).sum(-1), targets=targets)


def reverse_kl(chunk: Chunk) -> Part:
    """KL(q || p), with log p at least LOG_FLOOR (Zhou et al. 2023, arXiv:2310.08461)."""
    teacher, _ = chunk.taught()
    slope = chunk.log_q - teacher.log_p[:, None]
    return Part(chunk.sum_product(chunk.q, slope), slope=slope)


def total_variation(chunk: Chunk) -> Part:
    """Return half the sum of |q - p|, the rate of rejections (Zhou et al. 2023, arXiv:2310.08461)."""
    _, overlap = chunk.taught()
    return Part(1 - overlap, slope=_below(chunk).neg_())


def acceptance(chunk: Chunk) -> Part:
    """-log sum min(p, q), the log-likelihood of being accepted (LK losses, arXiv:2602.23881)."""
    _, overlap = chunk.taught()
    return Part(-overlap.log(), slope=_below(chunk).mul_((-1 / overlap)[..., None]))


def _below(chunk: Chunk) -> Tensor:
    """[c, K, U] derivative of min(p, q) by q: 1 where q < p, else 0."""
    teacher, _ = chunk.taught()
    return torch.lt(chunk.q, teacher.p[:, None], out=torch.empty_like(chunk.q))  # 4 times as fast as to(float)


OBJECTIVES: Mapping[str, Callable[[Chunk], Part]] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "acceptance": acceptance,
    "top_k": top_k,
}
"""All losses by the name that configs give them."""


def mix(chunk: Chunk, losses: Mapping[str, float], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of objectives, and the gradient of its terms times `scale`.

    Args:
        chunk: The distributions; `chunk.q` is overwritten.
        losses: Weight of each objective, above 0.
        scale: [c, K] factors of the terms in the gradient.

    Returns:
        terms: [c, K], without `scale`.
        gradient: [c, K, U] with respect to the heads' logits.
    """
    terms, mass = torch.zeros_like(scale), torch.zeros_like(scale)
    targets: Tensor | None = None
    slope: Tensor | None = None
    for name, weight in losses.items():
        part = OBJECTIVES[name](chunk)
        terms.add_(part.terms, alpha=weight)
        if part.targets is not None:
            targets = part.targets * weight if targets is None else targets.add_(part.targets, alpha=weight)
        if part.slope is not None:
            slope = part.slope.mul_(weight) if slope is None else slope.add_(part.slope, alpha=weight)
    if targets is not None:
        mass += targets.sum(-1, keepdim=True)
    if slope is not None:
        mass -= chunk.sum_product(chunk.q, slope)
        gradient = slope.add_(mass[..., None]).mul_(chunk.q).mul_(scale[..., None])
    else:
        gradient = chunk.q.mul_((mass * scale)[..., None])
    if targets is not None:
        gradient.addcmul_(targets[:, None], scale[..., None], value=-1)
    return terms, gradient
