"""Which target it is: the fingerprint of its weights, and in what precision they are held."""

from __future__ import annotations

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from decode.quantized import quantization
from heads.fingerprint import fingerprint
from heads.formats.target_files import TargetFiles


def find_fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of sizes and a sample of every weight, the same in all precisions and roundings.

    Weights that were rounded while loaded, or are not all in this process, are read from the model's files.

    Raises:
        ValueError: If those cannot tell.
    """
    weights = dict(model.named_parameters())
    elsewhere = any(weight.is_meta or is_traceable_wrapper_subclass(weight) for weight in weights.values())
    if elsewhere or quantization(model) is not None:
        return TargetFiles(str(model.config.name_or_path)).fingerprint
    lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    vocab_size, hidden_size = lm_head.get_parameter("weight").shape
    layers = int(model.config.get_text_config().num_hidden_layers)
    return fingerprint(vocab_size, hidden_size, layers, weights, weights.__getitem__)


def describe_precision(model: PreTrainedModel) -> str:
    """Return the number format of a model's states, and how its weights are rounded, if they are."""
    dtype, rounding = str(model.dtype).removeprefix("torch."), quantization(model)
    return dtype if rounding is None else f"{dtype}, weights in {rounding}"
