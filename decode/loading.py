"""What `Target.from_pretrained` understands: folders, devices, precisions."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    name: str, dtype: str | torch.dtype, device: torch.device, attn: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder or the hub.

    Raises:
        ValueError: If the folder is none of a model.
        OSError: If there is no such model.
    """
    check_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attn)
    except OSError as error:  # which need not name the model
        raise OSError(f"cannot load the model {name}: {error}") from error
    return model.to(device), tokenizer  # type: ignore[arg-type]


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
