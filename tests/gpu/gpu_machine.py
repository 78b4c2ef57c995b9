"""Print what numbers are measured on, as JSON."""

import importlib.metadata
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.requirements import Requirement

PACKAGES = ("torch", "transformers", "accelerate", "triton", "safetensors", "numpy")


def _unmet(installed: dict[str, str]) -> Iterator[str]:
    """Yield the project's requirements that are not met, with what there is."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        version = installed.get(wanted.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            yield f"{wanted.name} {version or 'missing'}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return "; ".join(found.splitlines())


def main() -> None:
    """Run the command."""
    facts = {"python": platform.python_version(), "system": platform.platform(), "cpus": str(os.cpu_count())}
    installed = {str(found.metadata["Name"]).lower(): found.version for found in importlib.metadata.distributions()}
    facts |= {name: installed[name] for name in PACKAGES if name in installed}
    if wrong := list(_unmet(installed)):
        facts["not as pyproject.toml wants it"] = "; ".join(wrong)
    if torch.cuda.is_available():
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "free GPU memory": f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB",
        }
    else:
        facts["gpu"] = "none"
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
