"""Targets whose weights are rounded to 8 or 4 bits while they are loaded, and what their weights take.

Weights only: what is multiplied by them keeps its number format, so that a node of a tree gets the logits that plain
decoding gives. LLM.int8(), which is what bitsandbytes makes of 8 bits, rounds the states too, by columns chosen among
all tokens of a pass: a token's logits then depend on the drafts beside it. So 8 bits are torchao's, with a scale for
each row, and 4 bits are bitsandbytes' NF4 (Dettmers et al. 2023, arXiv:2305.14314), with rounded scales; torchao has 4
bits for GPUs only. Embedding and lm_head, which heads read, are never rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import QuantizationMethod

from decode.support import UnsupportedTargetError

Quantize = Literal["8bit", "4bit"]
LIBRARIES = {"8bit": "torchao", "4bit": "bitsandbytes"}
BLOCK = 64
"""Weights that share a scale, in 4 bits."""
BITS = {"8bit": 8.0, "4bit": 4 + 8 / BLOCK + 32 / (BLOCK * 256)}
"""Of a weight; NF4's scales have 8 bits, and share one of 32 bits among 256."""
ROW_BYTES = {"8bit": 5, "4bit": 0}
"""Of each row: a scale in float32, and a zero point."""
ROUNDING = {
    "8bit": ("quant_type",),
    "4bit": ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules"),
}
"""What of transformers' settings decides on the weights."""
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
LEAST_SHARE = 0.5
"""Of the weights between embedding and lm_head."""


def quantization_config(quantize: str, dtype: str | torch.dtype) -> TorchAoConfig | BitsAndBytesConfig:
    """Return what transformers is told.

    Args:
        quantize: "8bit" or "4bit".
        dtype: Number format of the states; "auto" is the checkpoint's.

    Raises:
        ValueError: If there is no such quantization, its library is not installed, or it does not know the format.
    """
    if quantize not in LIBRARIES:
        raise ValueError(f"unknown quantize {quantize!r}; use one of {', '.join(LIBRARIES)}, or leave it out")
    if isinstance(dtype, torch.dtype) and dtype not in FORMATS:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"quantize={quantize} computes in float32, bfloat16 or float16, not in {name}")
    library = LIBRARIES[quantize]
    if find_spec(library) is None:
        raise ValueError(f'quantize={quantize} needs {library}: pip install -e ".[quantized]"')
    if quantize == "4bit":
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))  # else it sets torch.compile up, for all


def settle(model: PreTrainedModel, quantize: str) -> None:
    """Let a model that was loaded so compute in its own number format.

    Raises:
        ValueError: If it was rounded otherwise before, or hardly any of its weights are in layers that can be, or its
            library would compute them wrongly.
    """
    if quantization(model) != quantize:
        raise ValueError(
            f"quantize={quantize}: {model.config.name_or_path} is stored with rounded weights; leave quantize out, or "
            "give the model that is not rounded"
        )
    if quantize == "4bit":
        from bitsandbytes.nn.modules import Linear4bit

        for module in model.modules():
            if isinstance(module, Linear4bit):
                if not can_round([module], quantize, module.weight.device):
                    raise ValueError(
                        f"quantize=4bit: {module} reads rows that are no multiple of {BLOCK}, which bitsandbytes "
                        "unpacks wrongly on a CPU; use 8bit, or a GPU"
                    )
                module.compute_dtype = model.dtype
                # else CPUs with bfloat16 instructions compute in it, whatever the format, from weights laid out anew
                module.support_avx512bf16_for_cpu = False
    layers = linear_layers(model, quantize)
    rounded = sum(_size(layer) for layer in layers if _is_rounded(layer.get_parameter("weight")))
    inside = {id(layer.get_parameter("weight")) for layer in (*layers, model.get_input_embeddings())}
    inside.add(id(model.get_output_embeddings().weight))  # type: ignore[no-untyped-call]
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    between = sum(map(_size, layers)) + others
    if rounded < LEAST_SHARE * between:
        raise ValueError(
            f"quantize={quantize} rounds {rounded:,} of the {between:,} weights between embedding and lm_head of "
            f"{type(model).__name__}: the others are in no layers that {LIBRARIES[quantize]} knows; leave it out"
        )


def quantization(model: PreTrainedModel) -> str | None:
    """Return how a model's weights were rounded while it was loaded; None for those that were stored as they are.

    Returns:
        "8bit" or "4bit" if as here, else the name of a method, or None.

    Raises:
        UnsupportedTargetError: If it is LLM.int8(), stored so or not.
    """
    config: Any = vars(model.config).get("quantization_config")
    if config is None:
        return None
    settings: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
    if settings.get("load_in_8bit"):
        raise UnsupportedTargetError(
            f"{type(model).__name__} rounds as LLM.int8() does (bitsandbytes' 8 bits), states too, by columns that are "
            "chosen among all tokens of a pass, so that drafts would change the text; load it with "
            'Target.from_pretrained(..., quantize="8bit")'
        )
    loader = vars(model).get("hf_quantizer")
    if loader is None or loader.pre_quantized:
        return None
    method = QuantizationMethod(settings["quant_method"])
    for name, library in LIBRARIES.items():
        if library == method.value:
            ours = quantization_config(name, "auto").to_dict()
            if all(settings.get(key) == ours[key] for key in ROUNDING[name]):
                return name
    return method.value


def is_rounded(model: PreTrainedModel) -> bool:
    """Return whether a model's weights are rounded, by whomever and whenever."""
    return vars(model.config).get("quantization_config") is not None


def linear_layers(model: PreTrainedModel, quantize: str) -> list[nn.Module]:
    """Return the layers whose weights are rounded, or would be: all linear ones but the lm_head."""
    kinds = (nn.Linear, Conv1D) if quantize == "4bit" else (nn.Linear,)
    lm_head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [module for module in model.modules() if isinstance(module, kinds) and module is not lm_head]


def can_round(layers: Sequence[nn.Module], quantize: str, device: torch.device) -> bool:
    """Return whether the library computes right what it makes of these layers on a device."""
    rows = [
        layer.in_features if isinstance(layer, nn.Linear) else layer.get_parameter("weight").shape[0]
        for layer in layers
    ]
    return quantize != "4bit" or device.type != "cpu" or not any(row % BLOCK for row in rows)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights as they are stored, their scales included."""
    return sum(part.nbytes for parameter in model.parameters() for part in _stored(parameter))


def predicted_bytes(model: PreTrainedModel, quantize: str | None, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of `model`, which is not rounded, in a number format, rounded or not."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if quantize is None:
        return count * dtype.itemsize
    weights = [layer.get_parameter("weight") for layer in linear_layers(model, quantize)]
    rounded, rows = sum(weight.numel() for weight in weights), sum(len(weight) for weight in weights)
    return (count - rounded) * dtype.itemsize + int(rounded * BITS[quantize] / 8) + rows * ROW_BYTES[quantize]


def _stored(parameter: Tensor) -> list[Tensor]:
    """Return the tensors that a parameter consists of."""
    if is_traceable_wrapper_subclass(parameter):
        return [vars(parameter)[name] for name in parameter.__tensor_flatten__()[0]]
    state = vars(parameter).get("quant_state")
    if state is None:
        return [parameter]
    parts = [parameter, state.absmax, state.code]
    return [*parts, state.state2.absmax, state.state2.code] if state.nested else parts


def _size(layer: nn.Module) -> int:
    """Return how many weights a linear layer has, whatever they are stored in."""
    weight = layer.get_parameter("weight")
    return int(layer.in_features) * int(layer.out_features) if isinstance(layer, nn.Linear) else weight.numel()


def _is_rounded(weight: Tensor) -> bool:
    return is_traceable_wrapper_subclass(weight) or vars(weight).get("quant_state") is not None
