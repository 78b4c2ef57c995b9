"""Losses of draft heads over a large vocabulary, in memory that does not grow with the number of positions.

`[positions, vocabulary]` is never materialised: `vocabulary_loss` works through the positions in chunks and computes
the gradient of each chunk while its logits are at hand, so the backward pass only scales what is stored. The slow
obvious version is `vocabulary_loss_reference`; tests hold the two together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def vocabulary_loss(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    row_weights: Tensor,
    *,
    ce_weight: float,
    kl_weight: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted loss of K heads at `n` label positions, summed over positions and heads.

    Each head's term at a position is `ce_weight * CE(label) + kl_weight * KL(teacher || head)`, where the teacher is
    the target's own distribution at that position, renormalised over the draft vocabulary.

    Args:
        states: [n, K, D] head states, before the output projection.
        weight: [U, D] output projection of the heads, or [K, U, D] where each head has its own.
        labels: [n] column of the true token, in [0, U).
        teacher: [n, D] the target's state that predicted the label.
        teacher_weight: [U, D] the target's output projection, restricted to the draft vocabulary.
        row_weights: [n, K] weight of each term; 0 switches a term off.
        ce_weight: Weight of the cross-entropy with the label.
        kl_weight: Weight of the divergence from the target (Hinton et al. 2015, arXiv:1503.02531, temperature 1).
        chunk_size: Label positions whose logits exist at one time.

    Returns:
        loss: [] the sum, in float32 or better.
        term_losses: [n, K] the terms before `row_weights`, detached.
        correct: [n, K] bool, whether the head's best token is the label.
    """
    with torch.autocast(states.device.type, enabled=False):  # it would take the float32 sums to half precision
        loss, terms, correct = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
            states, weight, labels, teacher, teacher_weight, row_weights, ce_weight, kl_weight, chunk_size
        )
    return loss, terms, correct


def vocabulary_loss_reference(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    row_weights: Tensor,
    *,
    ce_weight: float,
    kl_weight: float,
) -> Tensor:
    """Compute the loss of `vocabulary_loss` in one piece, differentiated by autograd; the oracle of the tests."""
    logits = torch.einsum("nkd,kud->nku", states, weight.expand(states.shape[1], -1, -1))
    log_probs = F.log_softmax(logits, dim=-1)
    log_teacher = F.log_softmax(teacher @ teacher_weight.T, dim=-1)[:, None].expand_as(log_probs)
    index = labels[:, None, None].expand(-1, states.shape[1], 1)
    cross_entropy = -log_probs.gather(-1, index).squeeze(-1)
    divergence = (log_teacher.exp() * (log_teacher - log_probs)).sum(-1)
    return (row_weights * (ce_weight * cross_entropy + kl_weight * divergence)).sum()


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
        ce_weight: float,
        kl_weight: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, k, _ = states.shape
        exact = torch.promote_types(states.dtype, torch.float32)
        terms = states.new_zeros((n, k), dtype=exact)
        correct = torch.zeros((n, k), dtype=torch.bool, device=states.device)
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, n, chunk_size):
            rows = slice(start, min(start + chunk_size, n))
            label = labels[rows]
            index = label[:, None, None].expand(-1, k, 1)
            log_probs = F.log_softmax(_project(states[rows], weight.to(states.dtype)).to(exact), dim=-1)  # [c, K, U]
            terms[rows] = ce_weight * -log_probs.gather(-1, index).squeeze(-1)
            correct[rows] = log_probs.argmax(-1) == label[:, None]
            # d/dlogits of CE is q - onehot(label), of KL it is q - p
            grad = torch.zeros_like(log_probs[:, 0])
            if kl_weight:
                log_teacher = F.log_softmax(F.linear(teacher[rows], teacher_weight).to(exact), dim=-1)
                soft = log_teacher.exp()
                entropy = (soft * log_teacher).sum(-1, keepdim=True)
                cross = torch.einsum("cku,cu->ck", log_probs, soft)
                terms[rows] += kl_weight * (entropy - cross)
                grad -= kl_weight * soft
            grad.scatter_add_(-1, label[:, None], grad.new_full((grad.shape[0], 1), -ce_weight))
            grad_logits = log_probs.exp_().mul_(ce_weight + kl_weight).add_(grad[:, None])
            grad_logits.mul_(row_weights[rows].to(exact)[..., None])
            grad_logits = grad_logits.to(states.dtype)
            grad_states[rows] = _unproject(grad_logits, weight.to(states.dtype))
            if grad_weight is not None:
                grad_weight += _weight_grad(grad_logits, states[rows], weight)
        ctx.save_for_backward(grad_states, *([] if grad_weight is None else [grad_weight]))
        ctx.mark_non_differentiable(terms, correct)
        return (terms * row_weights).sum(), terms, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> Any:
        grad_states, *grad_weight = ctx.saved_tensors
        scaled = [grad * grad_loss.to(grad.dtype) for grad in (grad_states, *grad_weight)]
        return (scaled[0], scaled[1] if grad_weight else None, *[None] * 7)


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
