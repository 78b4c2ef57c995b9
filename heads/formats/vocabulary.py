"""What heads that come from elsewhere carry and ours borrow or lack: vocabularies, projections, embeddings, biases."""

from __future__ import annotations

import torch
from torch import Tensor

from heads.formats.folder import Foreign
from heads.formats.target_files import TargetFiles


def take_vocabulary(foreign: Foreign, vocab_size: int) -> Tensor | None:
    """Take `d2t` and `t2d`; return the target id of each draft id, in their order, or None without a `d2t`.

    Raises:
        ValueError: If they are no draft vocabulary.
    """
    mask = foreign.tensors.pop("t2d", None)
    if mask is not None and tuple(mask.shape) != (vocab_size,):
        raise ValueError(f"t2d has shape {tuple(mask.shape)}, expected {(vocab_size,)}")
    if "d2t" not in foreign.tensors:
        if mask is not None and not bool(mask.all()):
            raise ValueError("t2d leaves tokens out, but d2t is missing; copy the head again")
        return None
    offsets = foreign.take("d2t")
    if offsets.is_floating_point() or offsets.dim() != 1:
        raise ValueError(f"d2t must be [U] integers, got {offsets.dtype} {tuple(offsets.shape)}")
    ids = offsets.long() + torch.arange(len(offsets))
    if not _distinct(ids, vocab_size):
        raise ValueError(
            f"d2t must hold target ids less their draft ids, distinct and below {vocab_size}, but it leads to the ids "
            f"{ids[:4].tolist()} … {ids[-4:].tolist()}; absolute ids, as in GGUF files, are another convention"
        )
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], ids.sort().values):
        raise ValueError(
            "t2d and d2t name different tokens: they are of two heads, or d2t has absolute ids, another convention"
        )
    return ids


def take_token_map(foreign: Foreign, vocab_size: int) -> Tensor | None:
    """Take `token_map`; return the target id of each draft id, in their order, or None if there is none.

    Raises:
        ValueError: If it is no draft vocabulary.
    """
    if "token_map" not in foreign.tensors:
        return None
    ids = foreign.take("token_map")
    if ids.is_floating_point() or ids.dim() != 1 or not _distinct(ids, vocab_size):
        raise ValueError(f"token_map must hold distinct token ids below {vocab_size}")
    return ids.long()


def _distinct(ids: Tensor, vocab_size: int) -> bool:
    return 0 < len(torch.unique(ids)) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size


def drop_target_copy(foreign: Foreign, name: str, of_target: Tensor) -> None:
    """Drop a copy of one of the target's weights, which heads here borrow.

    Raises:
        ValueError: If it is not one, in its own precision.
    """
    if name not in foreign.tensors:
        return
    found = foreign.take(name, shape=tuple(of_target.shape))
    if not same(found, of_target):
        raise ValueError(f"{name} is not the target's, and heads here have none of their own; is it the right target?")


def drop_zeros(foreign: Foreign, name: str) -> None:
    """Drop a bias of zeros.

    Raises:
        ValueError: If it is not of zeros.
    """
    if name in foreign.tensors and bool(foreign.take(name).any()):
        raise ValueError(f"{name} is not zero, and heads of this type have no such bias here")


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether two weights are the same, in the precision of the first."""
    return torch.equal(found, expected.detach().to(found.dtype))


def sort_vocabulary(ids: Tensor | None, projection: Tensor, target: TargetFiles) -> dict[str, Tensor]:
    """Return `vocabulary` ascending and the projection in its order.

    Args:
        ids: [U] target ids of the rows; None for all. No vocabulary is returned if they are all, too.
        projection: [U, D]; not returned if it is the target's own.
        target: The target.

    Raises:
        ValueError: If the projection has another shape.
    """
    weight = target.lm_head.weight.detach()
    shape = (len(weight if ids is None else ids), weight.shape[1])
    if tuple(projection.shape) != shape:
        raise ValueError(f"lm_head.weight has shape {tuple(projection.shape)}, expected {shape}")
    found = {}
    if ids is not None:
        order = ids.argsort()
        found = {"vocabulary": ids[order]} if len(ids) < len(weight) else {}
        weight, projection = weight[ids[order]], projection[order]
    return found if same(projection, weight) else {**found, "projection.weight": projection}
