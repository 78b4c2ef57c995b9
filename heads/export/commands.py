"""The commands that serve what was exported, of each engine that reads it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from heads.base import Head
from heads.eagle3 import Eagle3Config
from heads.feature_head import FeatureHeadConfig
from heads.formats.eagle3 import sglang_drafts
from heads.formats.folder import MAP_FILE
from heads.formats.speculators import TOKENS
from heads.medusa import MedusaConfig

DTYPE = "bfloat16"
"""Where nobody knows the target's."""
OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Of llama.cpp's converter, which would make float16 of float32."""
PATHS = ("eagle-", "eagle3", "dflash", "dspark")
"""In the path of a draft, by which vLLM tells what it is."""


def serve_head(
    to: str,
    head: Head,
    out: str,
    target: str,
    engine: str | None,
    *,
    dtype: str = DTYPE,
    folder: str | None = None,
    num_layers: int | None = None,
) -> list[tuple[str, str]]:
    """Return engines and commands for a head; several commands are several lines.

    Args:
        to: The format.
        head: The head.
        out: Where it was written.
        target: Name of its target.
        engine: The one it was written for, in a format that is one engine's only.
        dtype: Precision of the target, which SGLang must be told, as it would take the head's for the head.
        folder: Of the target, by default its name; llama.cpp's converter takes no other.
        num_layers: Of the target, where they are known.
    """
    config = head.config
    if isinstance(config, MedusaConfig):
        return [("vLLM", _vllm(target, "medusa", out, config.num_heads))]
    assert isinstance(config, FeatureHeadConfig)
    tokens = min(TOKENS, config.max_depth)
    model = target if folder is None else folder
    if to == "gguf":
        lines = [_convert(model, "target.gguf", dtype), _llama_cpp(_whole(out), "draft-eagle3", tokens)]
        return [("llama.cpp", "\n".join(lines))]
    if to == "speculators":
        return [("vLLM", _words("vllm", "serve", out))]
    token_map = [] if head.vocabulary is None else ["--speculative-token-map", f"{out}/{MAP_FILE}"]
    if engine == "sglang":
        return [("SGLang", _sglang(target, "EAGLE", out, dtype, tokens, *token_map))]
    if engine == "vllm":
        return [("vLLM", _vllm(target, "eagle", out, tokens))]
    assert isinstance(config, Eagle3Config)
    found = [("vLLM", _vllm(target, "eagle3", out, tokens))]
    if sglang_drafts(config, num_layers):
        found.append(("SGLang", _sglang(target, "EAGLE3", out, dtype, tokens)))
    if len(config.feature_layers) == 3:
        converted = [_convert(out, "head.gguf", dtype, "--target-model-dir", _whole(model))]
        converted.append(_convert(model, "target.gguf", dtype))
        found.append(("llama.cpp", "\n".join([*converted, _llama_cpp("head.gguf", "draft-eagle3", tokens)])))
    return found


def serve_model(out: str, target: str, *, dtype: str = DTYPE, folder: str | None = None) -> list[tuple[str, str]]:
    """Return engines and commands for a draft model; see `serve_head`."""
    model = target if folder is None else folder
    converted = [_convert(out, "draft.gguf", dtype), _convert(model, "target.gguf", dtype)]
    return [
        ("vLLM", _vllm(target, "draft_model", out, TOKENS)),
        ("SGLang", _sglang(target, "STANDALONE", out, dtype, TOKENS)),
        ("llama.cpp", "\n".join([*converted, _llama_cpp("draft.gguf", "draft-simple", TOKENS)])),
    ]


def misread(to: str, out: str) -> list[str]:
    """Return what a path makes of a draft, in sentences; nothing if it is a good one."""
    found = [part for part in PATHS if part in out.lower()]
    if not found or to not in ("medusa", "hf"):
        return []
    return [f"vLLM takes it for something else as long as {found[0]!r} is in its path, {out}: move it"]


def _words(*words: str) -> str:
    return " ".join(map(shlex.quote, words))


def _vllm(target: str, method: str, out: str, tokens: int) -> str:
    config: dict[str, Any] = {"method": method, "model": out, "num_speculative_tokens": tokens}
    return _words("vllm", "serve", target, "--speculative-config", json.dumps(config))


def _sglang(target: str, algorithm: str, out: str, dtype: str, tokens: int, *more: str) -> str:
    """Return a command that drafts a chain; its three numbers go together."""
    draft = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", out)
    numbers = {"num-steps": tokens, "eagle-topk": 1, "num-draft-tokens": tokens + 1}
    flags = [word for name, number in numbers.items() for word in (f"--speculative-{name}", str(number))]
    return _words("sglang", "serve", "--model-path", target, "--dtype", dtype, *draft, *flags, *more)


def _convert(folder: str, file: str, dtype: str, *more: str) -> str:
    """Return a command that is to be run in llama.cpp's folder."""
    kind = ("--outtype", OUT_TYPES[dtype]) if dtype in OUT_TYPES else ()
    return _words("python", "convert_hf_to_gguf.py", _whole(folder), *more, *kind, "--outfile", file)


def _whole(path: str) -> str:
    """Return the whole path of what is here, for a command that runs elsewhere."""
    return os.path.abspath(path) if Path(path).exists() else path


def _llama_cpp(draft: str, kind: str, tokens: int) -> str:
    drafts = ("--spec-type", kind, "--spec-draft-n-max", str(tokens))
    return _words("llama-server", "-m", "target.gguf", "-md", draft, *drafts)
