"""Train Medusa or Hydra heads on a frozen target, or Medusa heads together with an adapter on it (medusa2).

The run lives in <run.dir>/<run.name>/: run.yaml, metrics.jsonl, checkpoints/, and the trained head in best/ and last/.
The same command continues a run that was killed, exactly where its newest checkpoint is. SIGTERM to this process
(accelerate's launcher does not pass it on) or Ctrl-C saves a checkpoint and ends. Every key can be set in the YAML
file or on the command line, which wins; head.type chooses medusa, hydra or medusa2. Example:

    accelerate launch train/medusa.py --config configs/medusa/smollm2-135m.yaml --optim.lr=5e-4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from data.conversations import Encoded
from decode import Target
from heads import Head, head_class
from heads.checkpoint import HeadNotes, save_head
from train.config import RunConfig
from train.joint import Medusa2Config, Medusa2InTraining, build_joint, save_joint
from train.new_head import build_head
from train.run import run_command

HEADS = {**{kind: head_class(kind).Config for kind in ("medusa", "hydra")}, "medusa2": Medusa2Config}


def build(config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]) -> Head:
    """Return an untrained head of the type that `config` names."""
    make = build_joint if config.head_type == "medusa2" else build_head
    return make(config, target, samples, say)


def save(head: Head, path: Path, *, target: Target, notes: HeadNotes) -> None:
    """Write a head folder, with the adapter if the head has one."""
    if isinstance(head, Medusa2InTraining):
        save_joint(head, path, target=target, notes=notes)
    else:
        save_head(head, path, target=target, notes=notes)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_command(HEADS, build, __doc__ or "", argv, save)


if __name__ == "__main__":
    main()
