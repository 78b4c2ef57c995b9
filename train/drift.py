"""Evaluation of heads with an adapter: decoding on the adapted target, and how far it is from the original one.

The drift is measured on the answers that the original target writes to the evaluation's prompts: both read them, and
their distributions are compared at every token. A target that changed loses quality that no acceptance shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from decode import Generation, Target, generate
from heads.base import Head
from train.config import EvalConfig
from train.evaluate import Evaluation
from train.joint import Medusa2InTraining

CHUNK = 128
"""Positions whose logits are in memory at one time."""


def make_evaluation(
    accelerator: Accelerator,
    target: Target,
    head: Head,
    sets: Mapping[str, Sequence[list[int]]],
    config: EvalConfig,
) -> Evaluation:
    """Return the evaluation that suits `head`; arguments as `Evaluation` has them."""
    kind = JointEvaluation if isinstance(head, Medusa2InTraining) else Evaluation
    return kind(accelerator, target, head, sets, config)


class JointEvaluation(Evaluation):
    """Decodes on the adapted target, plainly too, and adds `drift/kl` and `drift/agreement`.

    The target is not packed here, and computes the adapter beside its layers: measure speed on the merged one.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        target: Target,
        head: Head,
        sets: Mapping[str, Sequence[list[int]]],
        config: EvalConfig,
    ) -> None:
        super().__init__(accelerator, target, head, sets, config)
        assert isinstance(head, Medusa2InTraining)
        self._joint = head
        self._questions = [prompt for _, (_, prompt) in self._prompts]
        self._answers: list[list[int]] | None = None

    def __call__(self, give_up: Callable[[], bool]) -> Mapping[str, float] | None:
        """Return what `Evaluation` does, and the drift."""
        self._plain.clear()  # written by a target of the past
        with self._joint.adapter.on():
            figures = super().__call__(give_up)
        if figures is None:
            return None
        if self._answers is None:
            self._answers = [self._answer(prompt) for prompt in self._questions]
        drift = self._drift(self._answers)
        if self._accelerator.is_main_process:
            tqdm.write(describe(drift, self._joint.config.max_drift))
        return {**figures, **{f"drift/{name}": value for name, value in drift.items()}}

    def _answer(self, prompt: list[int]) -> list[int]:
        """Return what the original target answers."""
        output = generate(self._target, prompt, max_new_tokens=self._max_new_tokens)
        assert isinstance(output, Generation)
        return output.token_ids

    @torch.no_grad()
    def _drift(self, answers: Sequence[list[int]]) -> dict[str, float]:
        sums = torch.zeros(3, dtype=torch.float64, device=self._accelerator.device)
        for prompt, answer in zip(self._questions, answers, strict=True):
            text = torch.tensor([prompt + answer], device=self._target.device)
            original = self._target.encode(text, [text.shape[1]])
            with self._joint.adapter.on():
                adapted = self._target.encode(text, [text.shape[1]])
            kept = slice(len(prompt) - 1, -1)  # the states that predict the answer's tokens
            sums += compare(self._target, original[0, kept], adapted[0, kept])
        kl, same, count = self._accelerator.reduce(sums, "sum").tolist()
        return {"kl": kl / count, "agreement": same / count}


def compare(target: Target, original: Tensor, adapted: Tensor) -> Tensor:
    """Compare the distributions of two runs of states, [n, D].

    Returns:
        [3] float64: the sum of KL(original || adapted) in nats, how often their best tokens are the same, and n.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=original.device)
    for before, after in zip(torch.split(original, CHUNK), torch.split(adapted, CHUNK), strict=True):
        log_p, log_q = (F.log_softmax(target.lm_head(states).double(), dim=-1) for states in (before, after))
        kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
        same = (log_p.argmax(-1) == log_q.argmax(-1)).sum()
        sums += torch.stack([kl, same.double(), kl.new_tensor(len(before))])
    return sums


def describe(drift: Mapping[str, float], most: float) -> str:
    """Return a line about the drift, and a warning if its KL divergence is above `most`."""
    line = (
        f"drift of the adapted target: {drift['kl']:.4f} nats a token from the original, whose best token is its own "
        f"at {drift['agreement']:.1%} of them"
    )
    if drift["kl"] <= most:
        return line
    return line + (
        f"\nwarning: that is more than head.max_drift={most}: the target answers otherwise than before. Lower "
        "head.head_weight or head.adapter_lr, or raise the weights of head.base_losses"
    )
