"""Train an EAGLE head (head.type eagle, or eagle3, the default) on a frozen target.

The run lives in <run.dir>/<run.name>/: run.yaml, metrics.jsonl, checkpoints/, and the trained head in best/ and last/.
The same command continues a run that was killed, exactly where its newest checkpoint is. SIGTERM to this process
(accelerate's launcher does not pass it on) or Ctrl-C saves a checkpoint and ends. Every key can be set in the YAML
file or on the command line, which wins. Example:

    accelerate launch train/eagle.py --config configs/eagle3/smollm2-135m.yaml --head.unroll=3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from data.conversations import Encoded
from decode import Target
from heads.base import Head, head_class
from train.config import ConfigError, RunConfig
from train.new_head import build_head
from train.run import run_command

HEADS = {kind: head_class(kind).Config for kind in ("eagle3", "eagle")}


def build(config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]) -> Head:
    """Return an untrained head; EAGLE-3 takes the engines' feature layers where the config names none."""
    if config.head_type == "eagle3":
        layers = config.head["feature_layers"] or default_layers(target)
        target.check_layers(layers)
        say(f"features: outputs of decoder layers {', '.join(map(str, layers))} of {target.num_layers}")
        config = replace(config, head={**config.head, "feature_layers": tuple(layers)})
    return build_head(config, target, samples, say)


def default_layers(target: Target) -> tuple[int, ...]:
    """Return 2, n // 2 and n - 3 of the target's n layers, which the engines take unless told otherwise.

    Raises:
        ConfigError: If the target has too few layers for these to be three.
    """
    n = target.num_layers
    layers = (2, n // 2, n - 3)
    if not 2 < n // 2 < n - 3:
        raise ConfigError(
            f"{target.name} has {n} layers, too few for EAGLE-3's usual 2, {n // 2} and {n - 3}; set "
            f"head.feature_layers, such as [1, {n}]"
        )
    return layers


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_command(HEADS, build, __doc__ or "", argv)


if __name__ == "__main__":
    main()
