"""The founder's machine is gone for good: the run goes on, and the run's key moves to another machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.journeys.terminals import FriendsRun
from tests.patience import patience


@pytest.mark.timeout(patience(900))
def test_the_run_outlives_the_founders_machine_and_the_key_moves_to_another(tmp_path: Path) -> None:
    run = FriendsRun(tmp_path)
    a, _, c = run.three_friends()
    usb_stick = tmp_path / "run.key"
    shutil.copy(tmp_path / "run" / "run.key", usb_stick)

    run.seed.kill()
    shutil.rmtree(tmp_path / "run")
    a.trains()
    d = run.terminal("D").types(f"noloco-node --join {c.address} --stage 1")
    d.trains()
    a.types(f"noloco export --join {c.address} --out {tmp_path / 'model'}")
    assert (tmp_path / "model" / "model.safetensors").exists()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(usb_stick, elsewhere)
    shutil.copy(c.directory / "manifest.noloco", elsewhere)
    seed = run.founder("elsewhere", "--join", c.address)
    assert run.id_of(seed) == run.run_id
    seed.wait_for(r"All stages are served: 2 at stage 0, 2 at stage 1\.")
    e = run.terminal("E").types(f"noloco-node --join {seed.join_address()} --stage 0")
    assert e.serves(0) > 0
    e.trains()
    a.trains()

    assert run.beginnings() == [0, 1]  # each once, when the run began
    assert not run.happened("begun-anew", "yielded", "waiting-for-stage")
    run.everyone_leaves()
