"""A debug switch for the loop: after every step, all state is what a fresh start on the same text would make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.sampling import Sampler
from decode.session import Session, Sessions

if TYPE_CHECKING:
    from decode.propose import Proposing


class StateError(RuntimeError):
    """The target's cache or the drafter's state is not what its text makes it: a bug in a model, a head or Gorgon."""


@torch.inference_mode()
def check_state(
    target: Sessions,
    session: Session,
    proposing: Proposing | None,
    rows: Sequence[Sampler],
    hidden: Tensor,
    lengths: Sequence[int],
    features: Tensor | None = None,
) -> None:
    """Compare a session with a fresh prefill and a drafter with a fresh one, then overwrite what was dropped.

    Args:
        target: The target.
        session: Its session, after a commit; every row's text but its root must be in the cache.
        proposing: The proposer's state, told of the commit.
        rows: The texts.
        hidden: [B, L, D] the states that the step gave the proposer: each row's last tokens but its root.
        lengths: Number of states in each row.
        features: [B, L, F] the features that came with them, if the session records any.

    Raises:
        StateError: If they differ by more than rounding; it names the row and the place.
    """
    texts = [row.context[:-1] for row in rows]
    sizes = [len(text) for text in texts]
    if session.lengths != sizes:
        raise StateError(f"the cache holds {session.lengths} tokens, but the texts without their roots have {sizes}")
    fresh = target.session(len(texts), max(sizes), session.feature_layers)
    expected = fresh.prefill(texts)
    for row, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        pairs = zip(session.cache.contents(row), fresh.cache.contents(row), strict=True)
        for layer, (held, right) in enumerate(pairs):
            for name, a, b in (("keys", held[0], right[0]), ("values", held[1], right[1])):
                assert_close(a, b, f"row {row}, layer {layer}: cached {name} against a fresh prefill")
        new = slice(size - length, size)
        assert_close(hidden[row, :length], expected.hidden[row, new], f"row {row}: states against a fresh prefill's")
        if features is not None and expected.features is not None:
            what = f"row {row}: features against a fresh prefill's"
            assert_close(features[row, :length], expected.features[row, new], what)
    if proposing is not None:
        proposing.check(rows, expected.hidden, expected.features)
    session.cache.poison()


def assert_close(held: Tensor, expected: Tensor, what: str) -> None:
    """Raise `StateError` unless two tensors agree to rounding, relative to the largest entry."""
    if held.shape != expected.shape:
        raise StateError(f"{what}: shape {tuple(held.shape)} instead of {tuple(expected.shape)}")
    allowed = {torch.float64: 1e-9, torch.float32: 1e-3}.get(held.dtype, 0.1)
    difference = float((held.double() - expected.double()).abs().max()) if held.numel() else 0.0
    scale = max(float(expected.double().abs().max()), 1e-6) if held.numel() else 1.0
    if not difference <= allowed * scale:
        raise StateError(f"{what}: differs by {difference / scale:.2g} of the largest entry (allowed {allowed})")
