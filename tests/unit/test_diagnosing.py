"""The file for a bug report has what helps and nothing that tells who or where people are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bootstrap.inspect.diagnosing import diagnose, last_lines
from bootstrap.inspect.redacting import Redactor
from node.storage.state_directory import StateDirectory
from protocol.identity import Identity

PEER = Identity.from_seed("a volunteer").peer_id
OTHER = Identity.from_seed("another").peer_id
TOKEN = "noloco-" + "Ab3_-" * 12
SECRETS = {
    "full": f"Averaging with {PEER} failed",
    "end": f"Partner …{PEER[-8:]} is gone; …{PEER[-6:]} was",
    "multiaddress": f"/ip4/203.0.113.7/tcp/31337/p2p/{OTHER}",
    "ipv6": "/ip6/2001:db8::12:7/tcp/1 and 2001:db8:0:0:0:0:0:1",
    "host": "/dns4/gpu.example.org/tcp/31337",
    "token": f"joined with {TOKEN}",
    "name": "Serving stage 0 of run 'Anna's model' as Berta-PC.",
    "home": "/home/anna/texts/letters.txt and /home/anna/noloco-state/node.log",
    "folder": "Cannot write /mnt/anna-disk/noloco/checkpoint-3.safetensors (No space left on device).",
    "id": f"run {'0123456789abcdef' * 4}",
}
TOLD = (PEER, PEER[-8:], PEER[-6:], OTHER, "203.0.113.7", "2001:db8", "gpu.example", TOKEN, "Anna", "anna", "Berta",
        "0123456789abcdef")  # fmt: skip


def test_nobody_is_told_of_and_what_helps_stays() -> None:
    redactor = Redactor(["Anna's model", "Berta-PC"], home=Path("/home/anna"))
    found = redactor.of({"lines": list(SECRETS.values()), "by": {PEER: 3}, "step": 7})
    text = json.dumps(found)
    assert not [secret for secret in TOLD if secret in text]
    assert isinstance(found, dict)
    full, end, *_ = found["lines"]
    assert full == "Averaging with peer-1 failed"
    assert end == "Partner …peer-1 is gone; …peer-1 was"
    assert found["by"] == {"peer-1": 3}
    assert "/ip4/address-1/tcp/31337/p2p/peer-2" in found["lines"]
    assert "checkpoint-3.safetensors (No space left on device)." in text
    assert "~/texts" not in text or "anna" not in text
    assert redactor.replaced["peer"] >= 5


def test_times_versions_and_loopback_stay() -> None:
    line = "02:10:58  noloco 0.1.0 with torch 2.13.0 listens on 127.0.0.1:31337 and [::1]; 12:30 h, 1.2.3"
    assert Redactor().of(line) == line


async def test_the_file_of_a_node_that_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "state"
    state = StateDirectory(place)
    state.open()
    state.remember(port=31337, stage=1, name="Berta-PC")
    state.close()
    events = [{"event": "round", "partner": PEER, "name": "Berta-PC"}] * 700
    (place / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + '\n{"torn', encoding="utf-8")
    (place / "node.log").write_text("\n".join(SECRETS.values()) + "\nx" * 10_000, encoding="utf-8")
    out = tmp_path / "report.json"
    await diagnose(place, [], "", out)
    contents = out.read_text(encoding="utf-8")
    report = json.loads(contents)
    (node,) = report["nodes"]
    assert report["versions"]["noloco-node"]
    assert report["run"] == "not looked at: no --join"
    assert node["facts"] == {"port": 31337, "stage": 1, "name": "name-1"}
    assert len(node["events"]) == 500
    assert node["events"][0] == {"event": "round", "partner": "peer-1", "name": "name-1"}
    assert node["events"][-1] == '{"torn'
    assert PEER not in contents
    assert "Berta" not in contents
    assert out.stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr().out
    assert "its last 500 events and 300 lines of its log" in said
    assert "Replaced by numbers:" in said
    assert "× peer" in said


def test_a_long_file_is_read_at_its_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.inspect.diagnosing.TAIL_BYTES", 100)
    file = tmp_path / "log"
    file.write_text("".join(f"line {number}\n" for number in range(1000)), encoding="utf-8")
    assert list(last_lines(file, 3)) == ["line 997", "line 998", "line 999"]
    assert list(last_lines(tmp_path / "none", 3)) == []
