"""Several processes of one run, as `accelerate launch` or torchrun start them: who answers what, and where.

Each process writes a part of its own beside the output; the first one takes the parts over when all are done, or when
the next run begins, with however many processes. Parts need a file system that all processes see.
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed

T = TypeVar("T")

PATIENCE = timedelta(days=30)
"""How long who is done first waits for the others."""


@dataclass(frozen=True)
class Processes:
    """The processes of this run, and which of them this one is."""

    index: int = 0
    count: int = 1
    local_index: int = 0
    """Among those of the same machine."""

    @classmethod
    def join(cls) -> "Processes":
        """Meet the other processes that the launcher started; without a launcher there are none.

        They only wait for each other and add up counts, which gloo does on any machine.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        return cls(torch.distributed.get_rank(), count, int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def is_first(self) -> bool:
        """Whether this one writes what there is once."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's items: every `count`-th."""
        return list(items[self.index :: self.count])

    def add_up(self, *numbers: int) -> list[int]:
        """Wait until all processes are here and return the sums of their numbers.

        Raises:
            ValueError: If one of them has ended.
        """
        if self.count == 1:
            return list(numbers)
        total = torch.tensor([*numbers, 0])
        try:
            torch.distributed.all_reduce(total)
        except RuntimeError as error:
            raise ValueError("another process of this run has ended; what it says of it is above or below") from error
        return [int(number) for number in total[:-1]]

    def device(self, wanted: str | None) -> str | None:
        """Return the device of this process: a GPU of its own where GPUs are wanted and there."""
        if self.count == 1 or wanted not in (None, "cuda") or not torch.cuda.is_available():
            return wanted
        return f"cuda:{self.local_index}"

    def part(self, out: Path) -> Path:
        """Return where this process writes its answers."""
        return out if self.count == 1 else out.with_name(f"{out.name}.part-{self.index}-of-{self.count}")

    def leave(self) -> None:
        """Tell the others that this one has ended."""
        if self.count > 1:
            torch.distributed.destroy_process_group()


def find_parts(out: Path) -> list[Path]:
    """Return the parts beside an output."""
    return sorted(out.parent.glob(f"{glob.escape(out.name)}.part-*-of-*"))
