"""Heads as folders that inference engines load: `heads.export(...)`, `python -m heads.export`."""

from __future__ import annotations

from pathlib import Path

import torch

from heads.export.write import write


def export(
    head: str | Path,
    out: str | Path,
    *,
    to: str,
    target: str | Path | None = None,
    engine: str | None = None,
    tokens: int | None = None,
    dtype: torch.dtype | None = None,
    llama_cpp: str | Path | None = None,
) -> list[str]:
    """Write a head as engines load it, and return what is lost or differs there, in sentences.

    Args:
        head: Head folder, or for "hf" the folder of a draft model; or the name of either on the hub.
        out: Folder to write, or for "gguf" the file. An earlier export there is replaced, nothing else.
        to: "eagle3", "speculators", "medusa", "eagle", "hf" or "gguf".
        target: Folder or hub name of the target; by default as the head's folder names it. The model is not loaded.
        engine: For "eagle": "vllm" or "sglang", which want different configs.
        tokens: For "speculators": how many tokens vLLM drafts in a step; 4 by default.
        dtype: Store weights in this precision; by default that of the head's folder. "hf" copies only.
        llama_cpp: For "gguf": folder of llama.cpp, whose converter is run.

    Raises:
        ValueError: If the head cannot be written in this format, an argument is not for it, something of the head or
            the target is missing or damaged, or `out` holds something else.
    """
    options = {"target": target, "engine": engine, "tokens": tokens, "dtype": dtype, "llama_cpp": llama_cpp}
    written = write(head, out, to=to, options=options)
    return [*written.notes, *written.left]
