"""Losses of draft heads over a large vocabulary, in memory that does not grow with the number of positions.

`[positions, vocabulary]` is never materialised: `vocabulary_loss` works through the positions in chunks and computes
the gradient of each chunk while its logits are at hand, so the backward pass only scales what is stored. The slow
obvious version is `vocabulary_loss_reference`; tests hold the two together.

A loss is a SUM over positions and heads, each with its `row_weights` (`heads.base.HeadOutput`). The training loop alone
divides it, by the number of supervised tokens of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.base import FeatureBatch, HeadOutput
from heads.labels import Labels
from heads.objectives import LOG_FLOOR, OBJECTIVES, TOP_K, Chunk, Teacher, mix


def check_losses(losses: Mapping[str, float]) -> None:
    """Refuse losses that nothing can be trained with.

    Raises:
        ValueError: If there is none, a name is unknown, a weight is negative or no number, or all weights are 0.
    """
    known = ", ".join(OBJECTIVES)
    if not isinstance(losses, Mapping) or not losses:
        raise ValueError(
            f"losses must map names to weights, such as {{'ce': 0.2, 'kl': 0.8}}, got {losses!r}; known: {known}"
        )
    for name, weight in losses.items():
        if name not in OBJECTIVES:
            raise ValueError(f"unknown loss {name!r}; known: {known}")
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"the weight of loss {name!r} must be a number and not negative, got {weight!r}")
    if not any(losses.values()):
        raise ValueError(f"all losses have weight 0, got {dict(losses)}; give one of them a weight above 0")


def needs_teacher(losses: Mapping[str, float]) -> bool:
    """Return whether any of the losses compares with the target's distribution, and not with the data alone."""
    return any(weight for name, weight in losses.items() if name != "ce")


def label_loss(
    batch: FeatureBatch,
    labels: Labels,
    states: Tensor,
    weight: Tensor,
    lent_weight: Tensor,
    *,
    decay: float,
    losses: Mapping[str, float],
    chunk_size: int,
) -> HeadOutput:
    """Return the loss of a head at the labels of a batch, and what it reports of each depth.

    Args:
        batch: The batch; the target's state before each label is the teacher.
        labels: n of its positions.
        states: [n, K, D] what each depth's output projection reads.
        weight: [U, D] that projection, or [K, U, D].
        lent_weight: [U, D] the target's.
        decay: Depth k, from 0, weighs `decay ** k`.
        losses: Weight of each objective.
        chunk_size: Labels whose logits exist at one time.
    """
    depths = torch.arange(labels.active.shape[1], device=labels.active.device)
    loss, terms, correct, accept = vocabulary_loss(
        states,
        weight,
        labels.columns,
        batch.hidden[labels.rows, labels.positions - 1],
        lent_weight.to(batch.hidden.dtype),
        labels.active * decay**depths,
        losses=losses,
        chunk_size=chunk_size,
    )
    return HeadOutput(loss=loss, metrics=depth_metrics(terms, correct, labels.active, accept))


def vocabulary_loss(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    row_weights: Tensor,
    *,
    losses: Mapping[str, float],
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the weighted loss of K heads at `n` label positions, summed over positions and heads.

    Each head's term at a position is the weighted sum of the objectives in `losses` (see `heads.objectives`), where the
    teacher is the target's own distribution at that position, renormalised over the draft vocabulary.

    Args:
        states: [n, K, D] head states, before the output projection.
        weight: [U, D] output projection of the heads, or [K, U, D] where each head has its own.
        labels: [n] column of the true token, in [0, U).
        teacher: [n, D] the target's state that predicted the label.
        teacher_weight: [U, D] the target's output projection, restricted to the draft vocabulary.
        row_weights: [n, K] weight of each term; 0 switches a term off.
        losses: Weight of each objective, as `check_losses` accepts them.
        chunk_size: Label positions whose logits exist at one time.

    Returns:
        loss: [] the sum, in float32 or better.
        term_losses: [n, K] the terms before `row_weights`, detached.
        correct: [n, K] bool, whether the head's best token is the label.
        accept: [n, K] sum of min(p, q), the rate at which speculative sampling at temperature 1 would keep the head's
            token; None where no loss needs the teacher.
    """
    used = {name: weight for name, weight in losses.items() if weight}
    with torch.autocast(states.device.type, enabled=False):  # it would take the float32 sums to half precision
        loss, terms, correct, accept = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
            states, weight, labels, teacher, teacher_weight, row_weights, used, chunk_size
        )
    return loss, terms, correct, accept


def vocabulary_loss_reference(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    row_weights: Tensor,
    *,
    losses: Mapping[str, float],
) -> Tensor:
    """Compute the loss of `vocabulary_loss` in one piece, differentiated by autograd; the oracle of the tests."""
    logits = torch.einsum("nkd,kud->nku", states, weight.expand(states.shape[1], -1, -1))
    log_q = F.log_softmax(logits, dim=-1)
    log_p = F.log_softmax(teacher @ teacher_weight.T, dim=-1).clamp(min=LOG_FLOOR)[:, None].expand_as(log_q)
    p, q = log_p.exp(), log_q.exp()
    likely = p >= p.topk(min(TOP_K, p.shape[-1]), dim=-1).values[..., -1:]
    terms = {
        "ce": -log_q.gather(-1, labels[:, None, None].expand(-1, states.shape[1], 1)).squeeze(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "tv": (q - p).abs().sum(-1) / 2,
        "acceptance": -torch.minimum(p, q).sum(-1).log(),
        "top_k": -(p * log_q * likely).sum(-1),
    }
    return (row_weights * sum(value * terms[name] for name, value in losses.items())).sum()


def depth_metrics(terms: Tensor, correct: Tensor, active: Tensor, accept: Tensor | None) -> dict[str, Tensor]:
    """Return what every head reports of each depth: loss, top1 and, where the teacher was computed, accept.

    Args:
        terms: [n, K] losses, of depth 1 to K.
        correct: [n, K] bool, whether the best token was the label.
        active: [n, K] bool, which of them count.
        accept: [n, K] expected acceptance, or None; see `vocabulary_loss`.

    Returns:
        `depth1/loss` and so on, as `HeadOutput.metrics` wants them.
    """
    kinds = {"loss": terms, "top1": correct, "accept": accept}
    count = active.sum(0).to(terms.dtype)
    sums = {name: (values * active).sum(0).to(terms.dtype) for name, values in kinds.items() if values is not None}
    return {
        f"depth{k + 1}/{name}": torch.stack([total[k], count[k]])
        for k in range(active.shape[1])
        for name, total in sums.items()
    }


class _VocabularyLoss(torch.autograd.Function):
    """Chunked forward that keeps the gradients of states (and of a trainable weight) instead of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher: Tensor,
        teacher_weight: Tensor,
        row_weights: Tensor,
        losses: Mapping[str, float],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n, k, _ = states.shape
        exact = torch.promote_types(states.dtype, torch.float32)
        terms = states.new_zeros((n, k), dtype=exact)
        correct = torch.zeros((n, k), dtype=torch.bool, device=states.device)
        accept = torch.zeros_like(terms) if needs_teacher(losses) else None
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        sizes = (min(n, chunk_size), k, weight.shape[-2])
        memory = [states.new_empty(sizes, dtype=exact) for _ in range(2)]
        projection = weight.to(states.dtype)
        for start in range(0, n, chunk_size):
            rows = slice(start, min(start + chunk_size, n))
            known = None if accept is None else Teacher(F.linear(teacher[rows], teacher_weight).to(exact))
            logits = _project(states[rows], projection).to(exact)
            chunk = Chunk(logits, labels[rows], known, [part[: len(logits)] for part in memory])
            correct[rows] = chunk.log_q.argmax(-1) == labels[rows, None]
            if accept is not None:
                accept[rows] = chunk.taught()[1]
            terms[rows], grad_logits = mix(chunk, losses, row_weights[rows].to(exact))
            grad_logits = grad_logits.to(states.dtype)
            grad_states[rows] = _unproject(grad_logits, projection)
            if grad_weight is not None:
                grad_weight += _weight_grad(grad_logits, states[rows], weight)
        ctx.save_for_backward(grad_states, *([] if grad_weight is None else [grad_weight]))
        ctx.mark_non_differentiable(terms, correct, *([] if accept is None else [accept]))
        return (terms * row_weights).sum(), terms, correct, accept

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> Any:
        grad_states, *grad_weight = ctx.saved_tensors
        scaled = [grad * grad_loss.to(grad.dtype) for grad in (grad_states, *grad_weight)]
        return (scaled[0], scaled[1] if grad_weight else None, *[None] * 6)


def _project(states: Tensor, weight: Tensor) -> Tensor:
    """[c, K, D] by [U, D] or [K, U, D] -> [c, K, U]."""
    return F.linear(states, weight) if weight.dim() == 2 else torch.einsum("ckd,kud->cku", states, weight)


def _unproject(grad_logits: Tensor, weight: Tensor) -> Tensor:
    """[c, K, U] by [U, D] or [K, U, D] -> [c, K, D]."""
    return grad_logits @ weight if weight.dim() == 2 else torch.einsum("cku,kud->ckd", grad_logits, weight)


def _weight_grad(grad_logits: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    """[c, K, U], [c, K, D] -> the shape of `weight`."""
    if weight.dim() == 2:
        return torch.einsum("cku,ckd->ud", grad_logits, states)
    return torch.einsum("cku,ckd->kud", grad_logits, states)
