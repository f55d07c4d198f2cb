"""Exit codes: one table in the docs, one place in the code, and units that go by them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from protocol import errors
from protocol.errors import DONE, INTERRUPTED, LATER, MEND, NO, TERMINATED, JoinError, UserError, later

ROOT = Path(__file__).parents[2]
ENDS = ("sys.exit", "os._exit", "typer.Exit", "Exit", "end_process", "_exit")


def test_the_table_has_the_codes() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("| exit code |")[2].partition("\n\n")[0]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)]
    assert codes == sorted({DONE, NO, MEND, LATER, INTERRUPTED, TERMINATED})


def test_what_may_do_later_is_marked_alone() -> None:
    assert JoinError("x").exit_code == MEND
    assert later(JoinError("x")).exit_code == LATER
    assert UserError.exit_code == MEND


def test_no_other_file_has_a_code_of_its_own() -> None:
    for path in [
        path for folder in ("protocol", "node", "bootstrap") for path in (ROOT / folder).rglob("*.py")
    ]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ENDS:
                numbers = [part for part in call.args if isinstance(part, ast.Constant)]
                assert not [each for each in numbers if isinstance(each.value, int)], f"{path}:{call.lineno}"
    assert errors.__file__


@pytest.mark.parametrize("name", ["node", "seed", "page"])
def test_a_unit_starts_again_what_may_do_later(name: str) -> None:
    unit = (ROOT / "docker" / "deploy" / f"noloco-{name}.service").read_text(encoding="utf-8")
    assert f"\nRestartPreventExitStatus={MEND}\n" in unit
    assert "\nRestart=on-failure\n" in unit
    assert f"install -m 600 /dev/null /etc/noloco-{name}.env" in unit
