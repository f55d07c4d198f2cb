"""No file and no bytes are ever unpickled: that could run any code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
SOURCES = [file for package in ("protocol", "node", "bootstrap") for file in (ROOT / package).rglob("*.py")]


def unpickling(source: str) -> list[str]:
    """What of it could unpickle something: imports of such modules, `torch.load`, `numpy.load` unless forbidden."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in LOADERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LOADERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "np.load", "numpy.load"}:
            forbids = [ast.unparse(word) for word in node.keywords]
            found += [ast.unparse(node)] * ("allow_pickle=False" not in forbids)
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_unpickles(file: Path) -> None:
    assert unpickling(file.read_text(encoding="utf-8")) == []


def test_it_would_be_found() -> None:
    source = "import pickle\nfrom dill import load\ntorch.load(f)\nnp.load(f)\nnp.load(f, allow_pickle=False)"
    assert unpickling(source) == ["pickle", "dill", "torch.load(f)", "np.load(f)"]
