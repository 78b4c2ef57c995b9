"""Train Medusa heads on a frozen target.

The run lives in <run.dir>/<run.name>/: run.yaml, metrics.jsonl, checkpoints/, and the trained head in best/ and last/.
The same command continues a run that was killed, exactly where its newest checkpoint is. SIGTERM to this process
(accelerate's launcher does not pass it on) or Ctrl-C saves a checkpoint and ends. Every key can be set in the YAML
file or on the command line, which wins. Example:

    accelerate launch train/medusa.py --config configs/medusa/smollm2-135m.yaml --optim.lr=5e-4
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from data.conversations import Encoded
from data.vocabulary import draft_vocabulary
from decode import Target, UnsupportedTargetError
from heads.medusa import MedusaConfig, MedusaHead
from train.command_line import load_config
from train.config import RunConfig
from train.run import train
from train.teacher import check_teacher


def build_head(config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]) -> MedusaHead:
    """Return untrained Medusa heads, with the draft vocabulary that the data use most."""
    head_config = MedusaConfig(**config.head, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    check_teacher(target, head_config.kl_weight, bias=False)  # which the head itself refuses
    head = MedusaHead(head_config, target)
    if head_config.draft_vocab_size is not None:
        token_ids, coverage = draft_vocabulary(samples, target.vocab_size, head_config.draft_vocab_size)
        head.set_vocabulary(token_ids)
        say(f"draft vocabulary: {len(token_ids)} tokens, which are {coverage:.1%} of the supervised ones")
    return head


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; errors a user can mend are printed without a traceback."""
    try:
        train(load_config(MedusaConfig, sys.argv[1:] if argv is None else argv, __doc__ or ""), build_head)
    except (ValueError, OSError, FloatingPointError, UnsupportedTargetError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
