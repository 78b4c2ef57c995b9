"""The commands that serve what was exported, of each engine that reads it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from heads.base import Head
from heads.eagle3 import Eagle3Config
from heads.feature_head import FeatureHeadConfig
from heads.formats.folder import MAP_FILE
from heads.formats.speculators import TOKENS
from heads.medusa import MedusaConfig


def serve_head(to: str, head: Head, out: str, target: str, engine: str | None) -> list[tuple[str, str]]:
    """Return engines and commands for a head.

    Args:
        to: The format.
        head: The head.
        out: Where it was written.
        target: Name of its target.
        engine: The one it was written for, in a format that is one engine's only.
    """
    config = head.config
    if isinstance(config, MedusaConfig):
        return [("vLLM", _vllm(target, "medusa", out, config.num_heads))]
    assert isinstance(config, FeatureHeadConfig)
    tokens = min(TOKENS, config.max_depth)
    if to == "gguf":
        return [("llama.cpp", _llama_cpp("TARGET.gguf", out, "draft-eagle3", tokens))]
    if to == "speculators":
        return [("vLLM", _words("vllm", "serve", out))]
    token_map = [] if head.vocabulary is None else ["--speculative-token-map", f"{out}/{MAP_FILE}"]
    if engine == "sglang":
        return [("SGLang", _sglang(target, "EAGLE", out, *token_map))]
    if engine == "vllm":
        return [("vLLM", _vllm(target, "eagle", out, tokens))]
    assert isinstance(config, Eagle3Config)
    found = [("vLLM", _vllm(target, "eagle3", out, tokens))]
    if not config.norm_before_residual:
        found.append(("SGLang", _sglang(target, "EAGLE3", out)))
    if len(config.feature_layers) == 3:
        found.append(("llama.cpp", _convert(out, "--target-model-dir", target)))
    return found


def serve_model(out: str, target: str) -> list[tuple[str, str]]:
    """Return engines and commands for a draft model."""
    return [
        ("vLLM", _vllm(target, "draft_model", out, TOKENS)),
        ("SGLang", _sglang(target, "STANDALONE", out)),
        ("llama.cpp", f"{_convert(out)} && {_llama_cpp('TARGET.gguf', 'DRAFT.gguf', 'draft-simple', TOKENS)}"),
    ]


def _words(*words: str) -> str:
    return " ".join(map(shlex.quote, words))


def _vllm(target: str, method: str, out: str, tokens: int) -> str:
    config: dict[str, Any] = {"method": method, "model": out, "num_speculative_tokens": tokens}
    return _words("vllm", "serve", target, "--speculative-config", json.dumps(config))


def _sglang(target: str, algorithm: str, out: str, *more: str) -> str:
    server = ("python", "-m", "sglang.launch_server", "--model-path", target)
    draft = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", out)
    return _words(*server, *draft, *more)


def _convert(out: str, *more: str) -> str:
    return _words("python", "convert_hf_to_gguf.py", out, *more, "--outtype", "f32")


def _llama_cpp(target: str, draft: str, kind: str, tokens: int) -> str:
    drafts = ("--spec-type", kind, "--spec-draft-n-max", str(tokens))
    return _words("llama-speculative-simple", "-m", target, "-md", draft, *drafts)
