"""What llama.cpp drafts with an EAGLE-3 head in a GGUF file, read from what llama-speculative-simple prints."""

import re
import subprocess
import sys
from pathlib import Path

SIMPLE = Path("build", "bin", "llama-speculative-simple")
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+) ")
ACCEPTED = re.compile(r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)")


def convert_target(llama_cpp: Path, model: Path, out: Path) -> None:
    """Write a target as GGUF in float32."""
    command = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(model), "--outtype", "f32"]
    subprocess.run([*command, "--outfile", str(out)], check=True, capture_output=True)


def run(
    llama_cpp: Path, model: Path, head: Path, prompt: str, folder: Path, *, tokens: int, max_new_tokens: int
) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Decode one prompt; return its new tokens, and for each step how many there were and what was drafted."""
    (folder / "prompt.txt").write_text(prompt + "\n")  # a last newline is dropped
    precise = ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off"]
    command = [str(llama_cpp / SIMPLE), "-m", str(model), "-md", str(head), "-f", str(folder / "prompt.txt"), *precise]
    command += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(tokens), "--temp", "0", "-c", "1024"]
    command += ["--no-escape", "-n", str(max_new_tokens), "-t", "2", "-lv", "5"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return read_steps(done.stdout + done.stderr, max_new_tokens)


def read_steps(log: str, limit: int) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Read texts and drafts from a log."""
    text: list[int] = []
    steps, drafts = [], []
    for match in re.finditer(f"{CANDIDATE.pattern}|{ACCEPTED.pattern}", log):
        place, token, accepted, offered, last = match.groups()
        if place is not None:
            assert int(place) == len(drafts), log[-3000:]
            drafts.append(int(token))
            continue
        assert int(accepted) <= int(offered) <= len(drafts), log[-3000:]  # fewer are offered near the limit
        steps.append((len(text), drafts))
        text += [*drafts[: int(accepted)], int(last)]
        drafts = []
    return text[:limit], [step for step in steps if step[0] < limit]
