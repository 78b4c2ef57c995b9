"""Train Medusa or Hydra heads on a frozen target.

The run lives in <run.dir>/<run.name>/: run.yaml, metrics.jsonl, checkpoints/, and the trained head in best/ and last/.
The same command continues a run that was killed, exactly where its newest checkpoint is. SIGTERM to this process
(accelerate's launcher does not pass it on) or Ctrl-C saves a checkpoint and ends. Every key can be set in the YAML
file or on the command line, which wins; head.type chooses medusa or hydra. Example:

    accelerate launch train/medusa.py --config configs/medusa/smollm2-135m.yaml --optim.lr=5e-4
"""

from __future__ import annotations

from collections.abc import Sequence

from heads import head_class
from train.new_head import build_head
from train.run import run_command

HEADS = {kind: head_class(kind).Config for kind in ("medusa", "hydra")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_command(HEADS, build_head, __doc__ or "", argv)


if __name__ == "__main__":
    main()
