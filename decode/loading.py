"""What `Target.from_pretrained` understands: folders, devices, precisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from decode.placed import DeviceMap, join_ends
from decode.quantized import quantization_config, settle
from decode.sharded import shard_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    name: str,
    dtype: str | torch.dtype,
    device: torch.device,
    attn: str,
    *,
    quantize: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    shard: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder or the hub.

    Args:
        name: Folder or hub name.
        dtype: Weights' precision.
        device: Where to put it, unless `device_map` says it.
        attn: "sdpa" or "eager".
        quantize: Round the weights to "8bit" or "4bit"; see `decode.quantized`.
        device_map: How to spread the layers over the devices; see `decode.placed`.
        shard: Spread them over the processes; see `decode.sharded`.

    Raises:
        ValueError: If the folder is none of a model, or it cannot be rounded or spread so.
        OSError: If there is no such model.
    """
    check_folder(name)
    if shard and (quantize is not None or device_map is not None):
        raise ValueError("shard=True spreads layers as they are stored; leave quantize and device_map out, or it")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn}
    if isinstance(device_map, str) and device_map not in get_args(DeviceMap):
        raise ValueError(f"unknown device_map {device_map!r}; use one of {', '.join(get_args(DeviceMap))}")
    if quantize is not None:
        options["quantization_config"] = quantization_config(quantize, dtype)
    if quantize is not None or device_map is not None:
        options["device_map"] = {"": device} if device_map is None else device_map
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    except OSError as error:  # which need not name the model
        raise OSError(f"cannot load the model {name}: {error}") from error
    if quantize is not None:
        settle(model, quantize)
    if device_map is not None:
        join_ends(model)
    if shard:
        shard_model(model, device)
    elif "device_map" not in options:
        model = model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def check_folder(name: str) -> None:
    """Refuse a local folder that holds no model, with a better reason than transformers' own."""
    folder = Path(name)
    if not folder.is_dir():
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{name} is not a model folder: it has no config.json")
    if "model_type" not in config.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{name} is not a model folder: its config.json has no model_type; a head goes to --head")


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device that was asked for; None is a GPU if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use cpu, cuda or cuda:N") from error
    if place.type == "meta":
        raise ValueError("device meta computes nothing; use cpu, cuda or cuda:N")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but this torch sees no GPU; use cpu")
    return place


def find_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the precision of a name; "auto" is left as it is."""
    known = {"auto": "auto"} | {str(d).removeprefix("torch."): d for d in DTYPES}
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in known:
        raise ValueError(f"unknown dtype {dtype!r}; use one of {', '.join(known)}")
    return known[dtype]
