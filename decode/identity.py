"""Which target it is: the fingerprint of its weights, and in what precision they are held."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from decode.quantized import quantization
from heads.fingerprint import fingerprint
from heads.formats.target_files import TargetFiles


def find_fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of sizes and a sample of every weight, the same in all precisions and roundings.

    Weights that are rounded, or not all in this process, are read from the files that the model was loaded from.

    Raises:
        ValueError: If those cannot tell.
    """
    weights = dict(model.named_parameters())
    stored = quantization(model) is None and all(type(weight) is nn.Parameter for weight in weights.values())
    if not stored or any(weight.is_meta for weight in weights.values()):
        return TargetFiles(str(model.config.name_or_path)).fingerprint
    lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    vocab_size, hidden_size = lm_head.get_parameter("weight").shape
    layers = int(model.config.get_text_config().num_hidden_layers)
    return fingerprint(vocab_size, hidden_size, layers, weights, weights.__getitem__)


def describe_precision(model: PreTrainedModel) -> str:
    """Return the number format of a model's states, and how its weights are rounded, if they are."""
    dtype, rounding = str(model.dtype).removeprefix("torch."), quantization(model)
    return dtype if rounding is None else f"{dtype}, weights in {rounding}"
