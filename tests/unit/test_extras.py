"""A volunteer's node needs none of the packages that only data sets, plans and pictures take."""

from __future__ import annotations

import pytest

from node.machine.limits import optional
from protocol.errors import UserError


def test_a_missing_package_is_named_with_its_extra() -> None:
    assert optional("json", "data").loads("1") == 1
    with pytest.raises(UserError, match=r"noloco-node\[plan\]"):
        optional("no_such_package_at_all", "plan")
