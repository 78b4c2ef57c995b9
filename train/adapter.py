"""A LoRA adapter on the target (Hu et al. 2021, arXiv:2106.09685), by peft: trained, switched on and off, saved.

The layers are put into the target's own modules. They are off, and the target gives its original bits, but inside
`Adapter.on`; whoever computes states, features or plain texts beside the training sees the original target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode import Target
from decode.capture import hidden_states
from heads.base import Lender
from heads.files import write_atomically
from train.config import ConfigError

FOLDER = "adapter"
"""Where a head folder holds the adapter that was trained with the head."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""peft's name for an adapter that is the only one."""
PREFIX = "base_model.model."
"""What peft's files put before the names of modules."""


@dataclass(frozen=True)
class AdaptedTarget:
    """A target with an adapter, as heads see it (`heads.Lender`): embedding and lm_head are the original's."""

    name: str
    fingerprint: str
    embed: nn.Module
    lm_head: nn.Module
    quantize: str | None = None

    @classmethod
    def of(cls, target: Lender, weights: Mapping[str, Tensor]) -> AdaptedTarget:
        """Describe `target` with an adapter of these weights, by their names in peft's file."""
        digest = hashlib.sha256(target.fingerprint.encode())
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].detach().float().cpu().contiguous().numpy().tobytes())
        # where the target is looked for by this name, or a head is refused, the way out is in the message
        name = f"{target.name} with its adapter (`python -m train.merge HEAD OUT` writes both as one model)"
        return cls(name, digest.hexdigest()[:16], target.embed, target.lm_head, target.quantize)


class Adapter:
    """LoRA layers in the modules of `target`, which must not be packed; untrained ones change nothing."""

    def __init__(self, target: Target, *, rank: int, alpha: int, dropout: float, modules: Sequence[str] | None) -> None:
        """Put the layers in place, off.

        Args:
            target: The target; its own weights are frozen.
            rank: Width of the layers.
            alpha: Their output is scaled by alpha / rank.
            dropout: Share of their inputs that is dropped in training.
            modules: Last parts of the names of the linear layers to adapt; None for all but the lm_head.

        Raises:
            ValueError: If the target is packed, has an adapter, or has no such modules.
        """
        if target.packed is not None:
            raise ValueError("packing goes round the modules that an adapter replaces; load the target with pack=False")
        if any(isinstance(module, LoraLayer) for module in target.model.modules()):
            raise ValueError(f"{target.name} has an adapter already; load the target anew")
        target.fingerprint  # noqa: B018 - of the original weights, and cached
        self._target = target
        self.config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=find_modules(target, modules),
            base_model_name_or_path=target.name,
            task_type="CAUSAL_LM",
        )
        inject_adapter_in_model(self.config, target.model)
        target.model.eval()
        layers = {name: layer for name, layer in target.model.named_modules() if isinstance(layer, LoraLayer)}
        self._layers = list(layers.values())
        self.parameters: Mapping[str, nn.Parameter] = {
            f"{name}.{part}.weight": getattr(layer, part)[NAME].weight
            for name, layer in layers.items()
            for part in ("lora_A", "lora_B")
        }
        """Trained weights, in float32 at least, by the names of peft's files without their `PREFIX`."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        self._switch(False, training=False)

    def _switch(self, enabled: bool, *, training: bool) -> None:
        for layer in self._layers:
            layer.enable_adapters(enabled)
            layer.lora_dropout.train(training)
        for parameter in self.parameters.values():  # peft freezes what it switches off
            parameter.requires_grad_(True)

    @contextmanager
    def on(self, *, training: bool = False) -> Iterator[None]:
        """Let the target be the adapted one, with dropout if `training`."""
        self._switch(True, training=training)
        try:
            yield
        finally:
            self._switch(False, training=False)

    def states(self, token_ids: Tensor, *, training: bool) -> Tensor:
        """Return the adapted target's states, with gradients: [B, T], padded on the right -> [B, T, D]."""
        lm_head = self._target.lm_head
        with self.on(training=training), hidden_states(lm_head, [0] * len(token_ids)) as hidden:
            self._target.model(input_ids=token_ids, use_cache=False)
        return hidden[0]

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in peft's file, on the CPU."""
        return {PREFIX + name: weight.detach().cpu().contiguous() for name, weight in self.parameters.items()}

    def lender(self) -> AdaptedTarget:
        """Return the adapted target as it is now."""
        return AdaptedTarget.of(self._target, self.weights())

    def save(self, folder: Path) -> None:
        """Write the adapter in peft's own format to the folder `folder`, which is made."""
        folder.mkdir()
        self.config.save_pretrained(str(folder))
        weights = self.weights()
        write_atomically(folder / WEIGHTS, lambda temporary: save_file(weights, temporary, metadata={"format": "pt"}))


def find_modules(target: Target, wanted: Sequence[str] | None) -> list[str]:
    """Return the last parts of the names of the linear layers to adapt: those wanted, or all but the lm_head's.

    Raises:
        ConfigError: If a wanted name is none of theirs.
    """
    linears = {name: part for name, part in target.model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    never = {name.rpartition(".")[2] for name, part in linears.items() if part is target.lm_head}
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    known = [name for name in known if name not in never]
    unknown = sorted(set(wanted or ()) - set(known))
    if unknown or not known:
        raise ConfigError(
            f"head.modules: {target.name} has no linear layers {unknown} that can be adapted; it has "
            f"{', '.join(known) or 'none'}, and the lm_head never is"
        )
    return known if wanted is None else list(wanted)
