"""The README's Python runs as printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block_runs(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_there_are_python_blocks():
    assert len(BLOCKS) >= 2


def test_files_and_commands_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\b(?:configs|train|tests|decode|data)/[\w/.-]+\.(?:py|yaml)\b", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
