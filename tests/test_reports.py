"""`reports.md` lists every public report once, with a test that exists or the reason why there is none."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tests/reports.md").read_text(encoding="utf-8")
SECTIONS = {"A": (1, 27), "B": (28, 49), "C": (50, 66), "D": (67, 80), "E": (81, 90), "F": (91, 94), "G": (95, 97)}
TEST = re.compile(r"tests/[\w/]+\.py::\w+")


def rows_of(text: str) -> list[tuple[int, str, str, str]]:
    """Number, reports, property, and tests or reason of each row."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert all(len(row) == 4 for row in cells), "a row has four cells"
    return [(int(row[0]), row[1].strip(), row[2].strip(), row[3].strip()) for row in cells]


ROWS = rows_of(TEXT)


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_number_is_there_once_in_its_section():
    assert [number for number, *_ in ROWS] == list(range(1, 98))
    parts = re.split(r"^## (\w)\. .*$", TEXT, flags=re.MULTILINE)
    found = {
        name: [number for number, *_ in rows_of(text)] for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert found == {name: list(range(first, last + 1)) for name, (first, last) in SECTIONS.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_row_names_tests_that_exist_or_a_reason(row):
    _, reports, claim, answer = row
    assert re.search(r"#\d+|\(read\)", reports), "cites public issues by project and number, or code that was read"
    assert claim.endswith(".")
    names = TEST.findall(answer)
    if names:
        assert answer == ", ".join(names)
        for name in names:
            path, function = name.split("::")
            assert (ROOT / path).is_file(), path
            assert function in functions_of(path), f"{path} has no test {function}"
    else:
        assert re.fullmatch(r"Cannot apply: .{20,}\.", answer)


def test_a_test_of_a_report_is_named():
    """Tests in `test_reports_*.py` are there for this list."""
    written = {f"{path.relative_to(ROOT).as_posix()}::{name}"
               for path in (ROOT / "tests/decode").glob("test_reports_*.py")
               for name in functions_of(path.relative_to(ROOT).as_posix())}  # fmt: skip
    assert len(written) > 20
    assert written <= set(TEST.findall(TEXT))
