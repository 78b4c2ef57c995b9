"""A GGUF file for llama.cpp, written by llama.cpp's own converter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from heads.files import write_atomically
from heads.formats.folder import Foreign, write_folder
from heads.formats.target_files import TargetFiles

SCRIPT = "convert_hf_to_gguf.py"
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LAYERS = 3
MAGIC = b"GGUF"


def write_gguf(foreign: Foreign, target: TargetFiles, out: Path, *, dtype: torch.dtype, llama_cpp: Path) -> None:
    """Write an EAGLE-3 head as GGUF.

    Args:
        foreign: The head in the format "eagle3".
        target: Its target, whose tokenizer goes into the file.
        out: The file; must not exist, as nobody knows whose it is.
        dtype: Of the weights.
        llama_cpp: Folder of llama.cpp.

    Raises:
        ValueError: If llama.cpp cannot compute the head, its converter is not there or fails, or there is a file.
    """
    script = llama_cpp / SCRIPT
    if not script.is_file():
        raise ValueError(f"{llama_cpp} has no {SCRIPT}; give the folder of llama.cpp's source (--llama-cpp)")
    layers = foreign.config["num_aux_hidden_states"]
    if layers != LAYERS:
        raise ValueError(f"llama.cpp reads heads of exactly {LAYERS} decoder layers; this one has {layers}")
    if dtype not in TYPES:
        raise ValueError(f"GGUF files hold {', '.join(map(str, TYPES))}, not {dtype}; choose one (--dtype)")
    if out.exists():
        raise ValueError(f"{out} exists; delete it, or choose another file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(foreign, folder, dtype=dtype)
        command = [sys.executable, str(script), folder, "--target-model-dir", str(target.folder)]
        write_atomically(out, lambda temporary: _run([*command, "--outtype", TYPES[dtype]], temporary))


def _run(command: list[str], out: Path) -> None:
    """Run the converter.

    Raises:
        ValueError: If it fails, or writes no GGUF file. Nothing is left of it then.
    """
    done = subprocess.run([*command, "--outfile", str(out)], capture_output=True, text=True, check=False)
    if done.returncode == 0 and out.is_file() and out.open("rb").read(len(MAGIC)) == MAGIC:
        return
    out.unlink(missing_ok=True)
    says = "\n".join((done.stderr or done.stdout).strip().splitlines()[-10:])
    way_out = "\nllama.cpp's requirements must be in this environment: pip install sentencepiece protobuf"
    raise ValueError(
        f"{SCRIPT} wrote no GGUF file (exit status {done.returncode}); it said:\n{says}"
        f"{way_out if 'ModuleNotFoundError' in says else ''}"
    )
