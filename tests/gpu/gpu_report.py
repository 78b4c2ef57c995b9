"""What the parts of `everything.py` found: kept in a file, and shown as Markdown after every part."""

import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_sections
from gpu_parts import Part
from gpu_process import Outcome

ENDED = ("failed", "out of time", "stopped")
"""Outcomes of parts that did not come to their end."""
TAIL = 25
"""Lines of a log that are shown of a part that failed."""
INTRODUCTION = """The target called random has Llama-3.2-1B's shape and random weights: its losses and speed-ups mean
nothing, times, memory and exactness do. Parts that measure time ran alone, the others side by side. A text of bench or
of a training run's evaluation may differ from plain decoding's in a near tie; prove looks each of them up."""
SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[gpu_sections.Found]], list[str]]]] = {
    "exactness": ("Exactness", gpu_sections.exactness),
    "tests": ("Tests", gpu_sections.tests),
    "training": ("Training: memory and losses", gpu_sections.training),
    "throughput": ("Training: speed", gpu_sections.throughput),
    "costs": ("What a pass costs", gpu_sections.costs),
    "bench": ("Speed-up over plain decoding", gpu_sections.bench),
}


class Results:
    """Outcomes of parts, in scratch/results.json; after each, the folder `out` is brought up to date."""

    def __init__(self, out: Path, scratch: Path, parts: Sequence[Part], facts: Mapping[str, str], root: Path) -> None:
        self._out, self._scratch, self._parts, self._root = out, scratch, parts, root
        self._facts = dict(facts)
        self._lock = threading.Lock()
        self._logs = scratch / "logs"
        self._file = scratch / "results.json"
        for folder in (out, self._logs):
            folder.mkdir(parents=True, exist_ok=True)
        self._found: dict[str, dict[str, Any]] = {}
        if self._file.is_file():
            commands = {part.name: list(part.command) for part in parts}
            earlier = json.loads(self._file.read_text())
            self._found = {old["name"]: old for old in earlier["parts"] if old["command"] == commands.get(old["name"])}
            self._facts = earlier["facts"] | self._facts

    def has(self, name: str) -> bool:
        """Return whether a part of this name is done."""
        return name in self._found and self._found[name]["status"] == "done"

    def is_done(self, part: Part) -> bool:
        """Return whether a part need not be run any more."""
        return self.has(part.name)

    def logs(self, part: Part) -> tuple[Path, Path]:
        """Return the files of what a part prints and complains about."""
        name = part.name.replace(" ", "-")
        return self._logs / f"{name}.out", self._logs / f"{name}.err"

    def begin(self, part: Part) -> None:
        """Forget what an earlier try of a part has left, where that could be taken for this one's."""
        if part.kind == "exactness":
            for file in part.keeps:
                file.unlink(missing_ok=True)

    def add(self, part: Part, outcome: Outcome) -> None:
        """Keep the outcome of a part, and write everything."""
        with self._lock:
            self._found[part.name] = {"name": part.name, "command": list(part.command), **asdict(outcome)}
            if part.kind == "machine" and outcome.status == "done":
                self._facts |= json.loads(self.logs(part)[0].read_text())
            try:
                self._write_all()
            except OSError as error:  # the next part may find room again; what is in scratch is still there
                print(f"error: cannot write results ({error})", file=sys.stderr, flush=True)

    def _write_all(self) -> None:
        content = json.dumps({"facts": self._facts, "parts": list(self._found.values())}, indent=1) + "\n"
        for file in (self._file, self._out / "results.json"):
            _replace(file, content)
        self._pack()
        _replace(self._out / "report.md", self.report())

    def report(self) -> str:
        """Return everything as Markdown."""
        lines = [f"## On a GPU: {self._facts.get('gpu', 'unknown')}", "", *self._head(), "", *self._outcomes()]
        for kind, (title, show) in SECTIONS.items():
            parts = [part for part in self._parts if part.kind == kind and part.name in self._found]
            if parts:
                lines += ["", f"### {title}", "", *self._section(parts, show)]
        for part in self._parts:
            if self._found.get(part.name, {}).get("status") not in ENDED:
                continue
            tail = [line[:400] for file in self.logs(part) for line in _tail(file)]
            lines += ["", f"### {part.name}: {self._found[part.name]['status']}", "", "```", *tail, "```"]
        text = "\n".join(lines) + "\n"
        for path, name in ((self._scratch, "scratch"), (self._root, "")):
            text = text.replace(f"{path}{os.sep}", f"{name}{os.sep}" if name else "").replace(str(path), name or ".")
        return text

    def _head(self) -> list[str]:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts.items() if name != "size")
        sizes = {"small": "Tiny sizes: these numbers only show that the script works.", "full": INTRODUCTION}
        return [f"{facts}.", "", sizes[self._facts["size"]]]

    def _outcomes(self) -> list[str]:
        lines = ["| part | outcome | seconds |", "| --- | --- | --- |"]
        for part in self._parts:
            found = self._found.get(part.name, {"status": "not run", "seconds": 0.0})
            lines.append(f"| {part.name} | {found['status']} | {found['seconds']:.0f} |")
        return lines

    def _section(self, parts: Sequence[Part], show: Callable[[Sequence[gpu_sections.Found]], list[str]]) -> list[str]:
        ran = [part for part in parts if self._found[part.name]["seconds"]]
        commands = [f"    python {' '.join(part.command)}" for part in ran]
        found = [gpu_sections.Found(part.name, self.logs(part)[0], part.keeps) for part in ran]
        try:
            shown = show(found)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:  # a log may end anywhere
            shown = [f"What was found could not be read ({error!r}); it is in raw.zip."]
        return [*commands, "", *shown]

    def _pack(self) -> None:
        """Put all logs and what parts wrote into one file."""
        kept = dict.fromkeys(file for part in self._parts for file in part.keeps if file.is_file())
        new = self._out / "raw.zip.new"
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in (self._file, *sorted(self._logs.iterdir()), *kept):
                packed.write(file, file.relative_to(self._scratch))
        new.replace(self._out / "raw.zip")


def _replace(file: Path, text: str) -> None:
    """Write a file so that it is never there in part."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def _tail(file: Path) -> list[str]:
    """Return the last lines of a log; of progress bars, which overwrite themselves, the last state."""
    text = file.read_text(errors="replace") if file.is_file() else ""
    return [line.rpartition("\r")[2] for line in text.rstrip().split("\n")[-TAIL:]]
