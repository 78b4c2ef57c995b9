"""`everything.py --small`, from the target of random weights to the report."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import everything
import pytest
from gpu_parts import SMALL, Place, parts

NAMES = ["prove medusa bfloat16", "throughput medusa", "costs random plain"]


class Run:
    """What a run left in its folder."""

    def __init__(self, out: Path) -> None:
        self.report = (out / "report.md").read_text()
        self.outcomes = {
            part["name"]: part["status"] for part in json.loads((out / "results.json").read_text())["parts"]
        }
        with zipfile.ZipFile(out / "raw.zip") as packed:
            self.files = {name: packed.read(name).decode() for name in packed.namelist()}

    def section(self, title: str) -> str:
        """Return a section of the report."""
        return self.report.partition(f"### {title}\n")[2].partition("\n### ")[0]


def run(tmp_path: Path, *options: str) -> Run:
    command = [sys.executable, everything.__file__, "--out", str(tmp_path / "out"), "--small", "--jobs", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "out" / "report.md").read_text()
    return Run(tmp_path / "out")


def check_common(found: Run) -> None:
    prove = json.loads(found.files["prove-medusa-bfloat16.json"])
    section = found.section("Exactness")
    assert len(prove["checks"]) == 4
    for check in prove["checks"]:
        assert f"| {check['name']} | pass | {check['summary']} | {check['counts']['tokens_per_step']:.2f} |" in section
    assert any(check["counts"]["accepted"] for check in prove["checks"])  # else it proves little
    steps = [json.loads(line) for line in found.files["runs/medusa/metrics.jsonl"].splitlines()]
    losses = [line["train/loss"] for line in steps if "train/loss" in line]
    assert f"| {SMALL.steps} | {losses[0]:.3f}, {losses[-1]:.3f} |" in found.section("Training: memory and losses")
    assert re.search(r"\| train medusa \| memory \| [\d.]+ .iB \| [\d.]+ .iB \|", found.report)
    kept = re.search(r"states kept +([\d,]+) tokens/s, ([\d.]+) of", found.files["logs/throughput-medusa.out"])
    assert kept
    assert f"| medusa | training, states kept | {kept[1]} | {kept[2]} |" in found.section("Training: speed")
    plans = json.loads(found.files["runs/medusa/best/tuned.json"])
    plain = next(plan for key, plan in plans.items() if "layers plain" in key)
    one = next(cost for cost in plain["costs"] if (cost["rows"], cost["nodes"]) == (1, 1))
    assert f"{1e3 * one['seconds']:.1f} ms" in found.section("What a pass costs")
    assert "Tiny sizes: these numbers only show that the script works." in found.report


@pytest.mark.timeout(1200)
def test_a_part_of_a_small_run(tmp_path):
    found = run(tmp_path, "--parts", *NAMES)
    needed = ["machine", "target", "answers", "train medusa"]
    assert found.outcomes == dict.fromkeys([*needed, *NAMES], "done")
    check_common(found)
    assert "| bench plain | not run | 0 |" in found.report


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_whole_small_run(tmp_path):
    found = run(tmp_path)
    assert found.outcomes == {part.name: "done" for part in parts(SMALL, Place(tmp_path))}
    check_common(found)
    assert any("layers compiled" in key for key in json.loads(found.files["runs/medusa/best/tuned.json"]))
    assert "#### random compiled: Cost of a target pass" in found.section("What a pass costs")
    for how in ("plain", "compiled"):
        bench = json.loads(found.files[f"bench-{how}/comparison.json"])
        chain = next(row for row in bench["rows"] if row["method"] == "medusa chain 5" and row["rows"] == 1)
        value, low, high = chain["speedup"]
        assert f"{value:.2f} [{low:.2f}, {high:.2f}]" in found.section("Speed-up over plain decoding")
    assert re.search(r"\d+ (skipped|passed)", found.section("Tests"))
    assert "| plan eagle3 | memory |" in found.section("Training: memory and losses")
