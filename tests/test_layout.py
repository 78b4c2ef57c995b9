"""Who may import whom, and names that would shadow others."""

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["heads", "decode", "data", "train"]  # each imports only what stands to its left, and itself
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
LAZY = {"datasets", "wandb", "deepspeed", "gguf", "torchao", "bitsandbytes"}


def imports(path: Path) -> Iterator[tuple[str, str | None, bool]]:
    """Module, imported name, and whether the import is at the top level of the file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                yield node.module or "", alias.name, top


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)
    assert len(list(imports(ROOT / "decode" / "target.py"))) > 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_only_what_stands_to_their_left(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = PACKAGES if path.name == "__main__.py" else PACKAGES[: PACKAGES.index(package) + 1]  # commands are on top
    for module, _, top in imports(path):
        first = module.split(".")[0]
        assert first not in PACKAGES or first in allowed, f"{path.name} imports {module}"
        assert first != "tests"
        assert not (top and first in LAZY), f"{path.name} imports {module} at its top: it is optional or slow"
        if package == "heads":
            assert first != "transformers", "heads know torch and safetensors only"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_target_knows_transformers_caches_and_masks(path):
    if path == ROOT / "decode" / "target.py":
        return
    for module, name, _ in imports(path):
        if module.split(".")[0] == "transformers":
            assert not module.startswith(("transformers.cache_utils", "transformers.masking_utils"))
            assert not (name or "").endswith(("Cache", "Mask", "Layer"))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
            assert node.attr == "__version__", "import names from transformers, so that this test sees them"


def test_no_file_of_train_hides_an_installed_module():
    """`accelerate launch train/x.py` puts `train/` first on the path."""
    ours = {path.stem for path in (ROOT / "train").iterdir() if path.is_dir() or path.suffix == ".py"}
    taken = set(sys.stdlib_module_names)
    for name, distributions in importlib.metadata.packages_distributions().items():
        if set(distributions) != {"gorgon"}:
            taken.add(name)
    taken |= set(PACKAGES) | {"hydra", "wandb", "datasets", "accelerate", "tests"}
    assert not (ours - {"__init__", "__pycache__"}) & taken


def test_tests_are_no_packages_and_mirror_the_code():
    tests = ROOT / "tests"
    assert not list(tests.rglob("__init__.py"))
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    assert set(PACKAGES) <= folders


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) < 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
