"""Docstrings say what a thing is before they say what of it changes."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_class_is_described_by_its_state_alone() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in ("protocol", "node", "bootstrap")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and (ast.get_docstring(node) or "").startswith("Mutable state")
    ]
    assert found == []
