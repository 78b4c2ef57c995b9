"""Which tokens a head with a reduced output vocabulary may propose: those the target produces most often."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from data.conversations import Encoded


def draft_vocabulary(encoded: Sequence[Encoded], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """Return the `size` tokens that are supervised most often, and the share of supervised tokens they cover.

    Ties go to the lower id; if fewer distinct tokens occur than asked for, the lowest unused ids fill up.

    Args:
        encoded: Conversations whose supervised tokens are counted.
        vocab_size: V, of the target.
        size: U, of the draft vocabulary.

    Returns:
        [U] int64 target ids in ascending order, and the coverage in [0, 1].

    Raises:
        ValueError: If `size` is not in 1..V, if an id is not below V, or if no token is supervised.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft vocabulary must have 1 to {vocab_size} tokens (the target's vocabulary), got {size}")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in encoded:
        supervised = torch.tensor(list(compress(sample.token_ids, sample.loss_mask)), dtype=torch.int64)
        if supervised.numel() and not 0 <= int(supervised.min()) <= int(supervised.max()) < vocab_size:
            raise ValueError(
                f"token ids run from {int(supervised.min())} to {int(supervised.max())}, but the target's vocabulary "
                f"has {vocab_size}; encode the conversations with this target's tokenizer"
            )
        counts += torch.bincount(supervised, minlength=vocab_size)
    total = int(counts.sum())
    if total == 0:
        raise ValueError("no token is supervised, so none can be counted; see `python -m data.conversations preview`")
    # stable: equal counts, zero included, stay in the order of their ids
    ids = torch.sort(counts, descending=True, stable=True).indices[:size].sort().values
    return ids, int(counts[ids].sum()) / total
