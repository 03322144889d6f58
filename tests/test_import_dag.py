"""Who may import whom: the packages form a DAG, and router and client need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ALLOWED = {
    "baton": set(),
    "core": {"baton"},
    "engine": {"baton", "core"},
    "kvtransfer": {"baton", "core"},
    "worker": {"baton", "core", "engine", "kvtransfer"},
    "prefill_svc": {"baton", "core", "engine", "kvtransfer", "worker"},
    "decode_svc": {"baton", "core", "engine", "kvtransfer", "worker"},
    "router": {"baton", "core"},
    "client": {"baton", "core"},
}
WITHOUT_TORCH = ("core", "router", "client")


def source_files(package):
    folder = ROOT / "proto" / package if package == "baton" else ROOT / package
    return sorted(folder.rglob("*.py"))


def imported_modules(path):
    """Full names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_those_below_it(package):
    assert source_files(package)
    for path in source_files(package):
        used = {name.split(".")[0] for name in imported_modules(path)} & ALLOWED.keys()
        assert used <= ALLOWED[package] | {package}, f"{path} imports {used}"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_a_package_imports_neither_torch_nor_transformers(package):
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in source_files(package)
        if path.stem != "__main__"
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (finished.stdout.strip(), finished.stderr) == ("[]", "")
