"""A volunteer's node needs none of the packages that only data sets, plans and pictures take."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from node.machine.limits import optional
from protocol.errors import UserError
from protocol.files.installation import extra_line


def test_a_missing_package_is_named_with_its_extra() -> None:
    assert optional("json", "data").loads("1") == 1
    with pytest.raises(UserError, match=re.escape(extra_line("lab"))):
        optional("no_such_package_at_all", "lab")


def test_sentencepiece_is_not_installed_with_this() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    assert not [each for each in wanted if each.lower().startswith("sentencepiece")]
