"""Train Medusa or Hydra heads on a frozen target.

The run lives in <run.dir>/<run.name>/: run.yaml, metrics.jsonl, checkpoints/, and the trained head in best/ and last/.
The same command continues a run that was killed, exactly where its newest checkpoint is. SIGTERM to this process
(accelerate's launcher does not pass it on) or Ctrl-C saves a checkpoint and ends. Every key can be set in the YAML
file or on the command line, which wins; head.type chooses medusa or hydra. Example:

    accelerate launch train/medusa.py --config configs/medusa/smollm2-135m.yaml --optim.lr=5e-4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode import UnsupportedTargetError
from heads import head_class
from train.command_line import load_config
from train.new_head import build_head
from train.run import train

HEADS = {kind: head_class(kind).Config for kind in ("medusa", "hydra")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; errors a user can mend are printed without a traceback."""
    try:
        train(load_config(HEADS, sys.argv[1:] if argv is None else argv, __doc__ or ""), build_head)
    except (ValueError, OSError, FloatingPointError, UnsupportedTargetError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
