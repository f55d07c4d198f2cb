"""What earlier versions wrote is read, what later ones will write passes, and no format changes unnoticed."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import msgpack
import pytest
from pydantic import BaseModel

from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.giving.ledger import ContributionLedger
from node.membership.past import Past
from node.membership.view import Member, View
from node.storage import checkpoint_files
from node.storage.checkpoint_files import Checkpoint, contents_of, path_of, read
from node.storage.state_directory import StateDirectory
from protocol.access.peer_limits import BAN_AFTER_STRIKES
from protocol.access.revocations import Revocations
from protocol.access.tokens import SERIAL_BYTES
from protocol.errors import LaterVersion, ManifestError, NolocoError, Refused, WireError
from protocol.files.keeping import FORMAT, FORMAT_FILE, format_of, own
from protocol.ground import PeerId, Record
from protocol.messages import Asks, Done, Message
from protocol.messages.peers import Awaited, Hello, LossBest, LossTrend, NodeStats
from protocol.messages.training import Ready
from protocol.records.announcement import Announcement, Claim, LinkReport, record_key
from protocol.records.identity import Identity
from protocol.records.receipts import signed_receipt
from protocol.records.records import seal_record
from protocol.rpc.compatibility import (
    BOUNDARY,
    EXCHANGE,
    FEATURES,
    UNTOLD,
    Spoken,
    in_common,
    what_to_upgrade,
)
from protocol.rpc.rpc import Answer, Request, Traffic
from protocol.run.manifest import Manifest, load_preset
from protocol.run.signed_manifest import _SIGNATURE_DOMAIN, SignedManifest
from protocol.version import MINOR, PROTOCOL
from tests.fuzz.decoders import DECODERS
from tests.unit.test_frames import EXAMPLES, MESSAGES
from tests.unit.test_frames import read as read_frame
from tests.unit.test_state_directory import of_lineage
from tests.unit.two_peers import two_peers
from tests.versions.formats import VERSIONS, differences, formats, kept_formats, last_kept

KEPT = sorted(path.parent for path in VERSIONS.glob("*/kept.msgpack"))
DIRECTORIES = sorted(path.parent for path in VERSIONS.glob("*/*/manifest.noloco"))
OWNER = Identity.from_seed("owner")
PEER = Identity.from_seed("a peer").peer_id
# DiLoCo of then, among all replicas, with whose all-reduce this version's cannot be one
APART = {("088b778", "reduce"), ("088b778", "reduced")}
# examples that nobody sent: a number so large that later versions refuse it, ids of no peer
MADE_UP = {(version, "evaluated") for version in ("088b778", "0a455aa", "69c8df8")} | {
    ("0a455aa", "roll-call")
}


def kept_of(version: Path) -> dict[str, list[bytes]]:
    return dict(msgpack.unpackb((version / "kept.msgpack").read_bytes()))


def signed(contents: object) -> bytes:
    body = msgpack.packb(contents)
    return bytes(msgpack.packb([OWNER.public_key, body, OWNER.sign(_SIGNATURE_DOMAIN + body)]))


# --- no change unnoticed --------------------------------------------------------------------------


def test_a_format_that_has_changed_has_a_number_and_an_example() -> None:
    changed = differences(kept_formats(), formats())
    assert not changed, (
        f"What travels or is kept is not as in tests/versions/{last_kept()}: {', '.join(changed)}. Count MINOR "
        "up in protocol/version.py (PROTOCOL, where peers of the version before could not work with this one; FORMAT "
        "in protocol/files/keeping.py, where it could not go on from a directory of this one), say in CHANGELOG.md "
        "what changes for whom, and keep an example: python -m tests.versions"
    )


def test_a_change_of_any_format_is_seen() -> None:
    now = formats()
    assert not differences(now, copy.deepcopy(now))
    for place in (
        ("messages", "forward", "properties"),
        ("signed", "Announcement", "properties"),
        ("checkpoint",),
    ):
        changed = copy.deepcopy(now)
        inner = changed
        for key in place:
            inner = inner[key]
        inner["new"] = {"type": "integer"}
        assert differences(now, changed) == [".".join([*place, "new"])]


# --- what earlier versions wrote ------------------------------------------------------------------


@pytest.mark.parametrize("version", KEPT, ids=lambda path: path.name)
def test_all_that_an_earlier_version_sent_and_signed_is_read(version: Path) -> None:
    kept = kept_of(version)
    for kind, all_of_kind in kept.items():
        assert all_of_kind
        for raw in all_of_kind:
            if kind == "frame":
                frame = read_frame(raw, 1 << 16)
                if (version.name, frame.kind) not in APART | MADE_UP:
                    MESSAGES[frame.kind].parsed(frame.body)
                    frame.tensors()
            elif kind == "announcement":
                is_claim = "source" in msgpack.unpackb(raw)
                (Claim if is_claim else Announcement).read(Record(OWNER.peer_id, raw, 2e9))
            else:
                DECODERS[kind](raw)


@pytest.mark.parametrize("version", KEPT, ids=lambda path: path.name)
def test_an_earlier_version_is_told_nothing_that_it_does_not_know(version: Path) -> None:
    """It refuses fields that it does not know, and misses those that it must have: so defaults do not travel."""
    for raw in kept_of(version)["frame"]:
        frame = read_frame(raw, 1 << 16)
        if (version.name, frame.kind) in APART | MADE_UP:
            continue
        kind, body = MESSAGES[frame.kind], frame.body
        assert isinstance(body, dict)
        known = {name for name in kind.model_fields if name in body}
        required = {name for name, field in kind.model_fields.items() if field.is_required()}
        assert required <= known, "always sent, and not known there"
        assert kind.parsed(body).told().keys() <= body.keys()


@pytest.mark.parametrize("place", DIRECTORIES, ids=lambda path: "/".join(path.parts[-2:]))
def test_the_directory_of_an_earlier_version_is_taken_over(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "node")
    state = StateDirectory(tmp_path / "node")
    found = state.manifest()
    assert found is not None
    assert found.to_bytes() == (place / "manifest.noloco").read_bytes(), (
        "what was signed is never written anew"
    )
    own(tmp_path / "node", "--state-dir").release()
    assert format_of(tmp_path / "node")[0] == FORMAT
    if list(place.glob("checkpoint*.safetensors")):
        saved = state.checkpoint(found.run_id)
        assert saved is not None
        assert saved.state.step > 0
        assert saved.stage or saved.position is not None
        state.save_checkpoint(found.run_id, saved)
        again = state.checkpoint(found.run_id, saved.stage)
        assert again is not None
        assert again.state.step == saved.state.step


# --- manifests of earlier and later versions ------------------------------------------------------


def changed(section: str, **settings: object) -> dict[str, Any]:
    contents = load_preset("tiny").model_dump()
    return {**contents, section: {**contents[section], **settings}}


OFF = [("outer", {"drift_control": False}), ("outer", {"overlap": "none"}), ("outer", {"weighting": "equal"})]
OFF += [("wire", {"error_feedback": False}), ("access", {"work_bits": 0})]


@pytest.mark.parametrize(("section", "settings"), OFF)
def test_a_removed_setting_that_is_off_changes_nothing(section: str, settings: dict[str, object]) -> None:
    raw = signed(changed(section, **settings))
    found = SignedManifest.from_bytes(raw)
    assert found.manifest == load_preset("tiny")
    assert found.to_bytes() == raw
    found.require_trainable()


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("outer", {"drift_control": True}), ("outer", {"overlap": "late"}), ("outer", {"weighting": "tokens"}),
        ("wire", {"error_feedback": True}), ("access", {"work_bits": 1}), ("access", {"work_bits": 32}),
    ],
)  # fmt: skip
def test_a_run_with_a_removed_setting_is_read_and_not_trained(
    section: str, settings: dict[str, object]
) -> None:
    found = SignedManifest.from_bytes(signed(changed(section, **settings)))
    assert found.manifest.model == load_preset("tiny").model
    with pytest.raises(ManifestError, match=rf"^This run trains with {section}\.\w+ = .*, commit \w{{7}} of"):
        found.require_trainable()


@pytest.mark.parametrize("value", [None, "yes", [], {"a": True}, 22.0])
def test_a_removed_setting_with_a_value_that_it_never_had_is_no_setting(value: object) -> None:
    for section, name, none in (("outer", "drift_control", 1), ("access", "work_bits", True)):
        for never in (value, none):
            with pytest.raises(LaterVersion, match=rf"{section}\.{name}"):
                SignedManifest.from_bytes(signed(changed(section, **{name: never})))


def test_a_later_versions_manifest_names_what_is_not_known_and_what_to_do() -> None:
    with pytest.raises(LaterVersion, match=r"a later version .* inner\.looks_ahead, .*Upgrade: ") as told:
        SignedManifest.from_bytes(signed(changed("inner", looks_ahead=3)))
    assert "elete" not in str(told.value)


@pytest.mark.parametrize(
    ("section", "setting"), [("outer", "method"), ("wire", "gossip"), ("inner", "optimizer")]
)
def test_a_later_versions_word_for_a_setting_is_told_as_that(
    section: str, setting: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.noloco").write_bytes(signed(changed(section, **{setting: "told later"})))
    with pytest.raises(LaterVersion, match=rf'has {section}\.{setting} = "told later".*Upgrade: ') as told:
        StateDirectory(tmp_path).manifest()
    assert "elete" not in str(told.value)


# --- what later versions will write ---------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_one_field_more_passes_in_answers_and_not_in_requests(example: Message) -> None:
    body = {**example.told(), "told later": [1, {"x": b"2"}]}
    if isinstance(example, Asks) and not isinstance(example, Hello):
        with pytest.raises(WireError, match="told later"):
            type(example).parsed(body)
    else:
        assert type(example).parsed(body) == example


def rows_in(kind: type[BaseModel]) -> Iterator[tuple[str, type[tuple[Any, ...]], bool]]:
    """The fields of a message that are rows: their type, and whether there are several."""
    for name, field in kind.model_fields.items():
        several = get_origin(field.annotation) is list
        inner = [field.annotation, *get_args(field.annotation)]
        inner += [deeper for one in inner if get_origin(one) is UnionType for deeper in get_args(one)]
        for one in inner:
            if isinstance(one, type) and issubclass(one, tuple) and hasattr(one, "_fields"):
                yield name, one, several


FULL_OF_ROWS = NodeStats(
    stage=0, state="serving", step=2, round=3, trend=LossTrend(1.0, 2.0, 3.0, 0.5), best=LossBest(2.0, 3.0),
    awaited=Awaited(1, 7, PEER, 1.5, 2.5), links=[LinkReport("a" * 16, 0.5)],
)  # fmt: skip
WITH_ROWS = [
    (example, name, several)
    for example in (*EXAMPLES, FULL_OF_ROWS)
    for name, _, several in rows_in(type(example))
    if name in example.told()
]


@pytest.mark.parametrize(
    ("example", "name", "several"), WITH_ROWS, ids=lambda each: getattr(each, "kind", str(each))
)
def test_one_entry_more_passes_in_each_row(example: Message, name: str, several: bool) -> None:
    body = example.told()
    rows = [[*row, "told later"] for row in body[name]] if several else [*body[name], "told later"]
    assert type(example).parsed({**body, name: rows}) == example


def test_rows_of_all_kinds_were_tried() -> None:
    assert {"records", "receipts", "points", "copies", "trend", "best", "awaited", "links"} <= {
        name for _, name, _ in WITH_ROWS
    }


def test_a_later_versions_record_is_read() -> None:
    said = Announcement(stage=1, state="serving", since=1.7e9, links=[LinkReport("a" * 16, 0.5)])
    contents = msgpack.unpackb(said.to_bytes())
    contents |= {
        "state": "sleeping",
        "told later": 1,
        "features": [*FEATURES, "exchange-9"],
        "minor": MINOR + 1,
    }
    contents["links"] = [[*row, "told later"] for row in contents["links"]]
    found = Announcement.read(Record(PEER, msgpack.packb(contents), 2e9))
    assert (found.state, found.minor, found.links) == ("joining", MINOR + 1, said.links)


def member(peer: str = PEER, **more: Any) -> Member:
    said = Announcement(stage=0, state="serving", since=1.0, **more)
    return Member(PeerId(peer), said, 1e9)


def test_a_member_of_a_later_minor_works_with_this_one() -> None:
    view = View(lambda: 0.0)
    view.take([member(minor=MINOR + 1, features=["exchange-9", *FEATURES], program="0.9.0")])
    assert view.serving(0, 0.0) == [PEER]
    assert view.can_average(PeerId(PEER))


def test_a_member_of_another_protocol_is_of_no_stage_and_is_known() -> None:
    view = View(lambda: 0.0)
    view.take([member()])
    later = member(protocol=PROTOCOL + 1, program="2.0.0")
    view.take([Member(later.peer, later.announcement, 2e9)])
    assert not view.members(0, 0.0)
    assert [said.program for said in view.of_other_protocols(0.0)] == ["2.0.0"]
    assert not view.of_other_protocols(3e9)


def test_of_two_records_of_other_protocols_the_one_that_ends_last_counts() -> None:
    view = View(lambda: 0.0)
    before = Member(PeerId(PEER), member().announcement, 100.0)
    view.take([before])
    view.take([Member(PeerId(PEER), member(protocol=PROTOCOL + 1).announcement, 160.0)])
    view.take([before])  # as another holder of its key still has it
    assert not view.members(0, 0.0)
    view.take([Member(PeerId(PEER), member().announcement, 200.0)])
    assert view.serving(0, 0.0) == [PEER]
    assert not view.of_other_protocols(0.0)


@pytest.mark.parametrize("program", ["1.0;curl${IFS}x|sh", "$(x)", "-rx", "1.0 x", "1.0`x`", "1.0&x"])
def test_no_stranger_writes_into_a_command_that_people_copy(program: str) -> None:
    told = what_to_upgrade(Spoken(0, program))
    assert told.endswith("Ask them to upgrade")
    assert what_to_upgrade(Spoken(0, "0.1.2+g1234567")).endswith("or install version 0.1.2 here")


def test_members_without_a_feature_in_common_get_nothing_that_needs_it() -> None:
    view = View(lambda: 0.0)
    view.take([member(features=["exchange-1"])])
    assert not view.serving(0, 0.0)
    view.take([Member(PeerId(PEER), member(features=["boundary-1"]).announcement, 2e9)])
    assert view.serving(0, 0.0) == [PEER]
    assert not view.can_average(PeerId(PEER))
    assert view.apart(0, 0.0) == 1


def test_whose_contributions_do_not_fit_is_left_out_until_it_is_started_again() -> None:
    view = View(lambda: 0.0)
    view.take([member()])
    assert view.can_average(PeerId(PEER))
    assert view.note_apart(PeerId(PEER))
    assert not view.note_apart(PeerId(PEER)), "told once"
    assert not view.can_average(PeerId(PEER))
    again = Announcement(stage=0, state="serving", since=2.0)
    view.take([Member(PeerId(PEER), again, 2e9)])
    assert view.can_average(PeerId(PEER))


def test_a_record_that_names_no_features_is_of_the_versions_before_there_were_any() -> None:
    assert in_common(EXCHANGE, []) == "exchange-1"
    assert in_common(BOUNDARY, UNTOLD) == "boundary-1"
    assert in_common(EXCHANGE, ["exchange-2", "boundary-1"]) == ""


# --- directories and checkpoints ------------------------------------------------------------------


def test_a_later_versions_directory_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    text = json.dumps({"format": FORMAT + 1, "program": "9.9.9", "told later": 1})
    (tmp_path / FORMAT_FILE).write_text(text)
    (tmp_path / "lock").touch()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(LaterVersion, match=r"written by noloco-node 9\.9\.9 .* --state-dir"):
        own(tmp_path, "--state-dir", is_private=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / FORMAT_FILE).unlink()
    own(tmp_path, "--state-dir").release()  # the lock was given back


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "9"}', '{"format": true}', '{"format": -1}', "\x00"]
)
def test_a_damaged_number_of_a_directory_is_written_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / FORMAT_FILE).write_text(text)
    (tmp_path / "lock").touch()
    own(tmp_path, "--state-dir").release()
    assert format_of(tmp_path)[0] == FORMAT


def written(path: Path, saved: Checkpoint, **more: str) -> None:
    """A checkpoint as a later version might write it: with facts of its own under the checksum of all."""
    parts = contents_of("run", saved)
    header = json.loads(bytes(parts[1]))
    facts = {**header["__metadata__"], **more}
    del facts[checkpoint_files.OF_FACTS]
    facts[checkpoint_files.OF_FACTS] = str(checkpoint_files._checksum_of(facts))
    header["__metadata__"] = facts
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(b"".join([len(raw).to_bytes(8, "little"), raw, *map(bytes, parts[2:])]))


def test_a_later_versions_checkpoint_is_read_where_it_can_be_and_never_called_damaged(tmp_path: Path) -> None:
    saved = of_lineage(0, 1_000.0, step=5)
    path = path_of(tmp_path, saved.stage)
    written(path, saved, told_later="1")
    assert read(path)[1].state.step == 5
    written(path, saved, format="2")
    state = StateDirectory(tmp_path)
    with pytest.raises(LaterVersion, match="stays as it is") as told:
        state.checkpoint("run", saved.stage)
    assert "elete" not in str(told.value)
    assert path.exists()


def test_a_later_versions_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    saved = of_lineage(0, 1_000.0, step=5)
    path = path_of(tmp_path, saved.stage)
    written(path, saved, format="2")
    before = path.read_bytes()
    with pytest.raises(LaterVersion, match="stays as it is"):
        StateDirectory(tmp_path).save_checkpoint("run", saved)
    assert path.read_bytes() == before


def test_a_later_versions_directory_keeps_its_mode_and_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / FORMAT_FILE).write_text(json.dumps({"format": FORMAT + 1, "program": "9.9.9"}))
    (tmp_path / "identity.key").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(LaterVersion):
        own(tmp_path, "--state-dir", is_private=True)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / "lock").exists()


def test_later_versions_rows_in_small_files_are_read(tmp_path: Path) -> None:
    run, worker, now = "r" * 32, Identity.from_seed("a worker"), 1.7e9
    ledger = ContributionLedger()
    ledger.note_tokens(worker.peer_id, 500)
    ledger.keep(signed_receipt(run, PEER, worker.peer_id, (7, 1), "", worker.sign))
    contents = json.loads(ledger.as_json())
    for row in (*contents["had"].values(), *contents["receipts"]):
        row.append("told later")
    (tmp_path / "contribution.json").write_text(json.dumps(contents))
    found = ContributionLedger.read(tmp_path / "contribution.json")
    assert (found.had, found.receipts) == (ledger.had, ledger.receipts)
    said = Announcement(stage=0, state="serving", since=now, step=10)
    sealed = seal_record(worker, record_key(run, 0, worker.peer_id, 0), said.to_bytes(), now + 60)
    past, again = (Past(run, lambda _: 1_000, 60.0, lambda: now) for _ in range(2))
    past.note(Member(worker.peer_id, said, now + 60, sealed=sealed))
    rows = [[*row, "told later"] for row in msgpack.unpackb(past.to_bytes())]
    again.take_up(msgpack.packb(rows))
    assert again.of(0) == past.of(0) != []


def test_a_later_versions_list_of_revocations_still_revokes() -> None:
    run, entry = "r" * 32, bytes(SERIAL_BYTES)
    body = msgpack.packb([run, 1.7e9, [entry], "told later"])
    sealed = msgpack.packb([body, OWNER.sign(b"noloco revocations 1:" + body)])
    assert Revocations.read(sealed, run, OWNER.public_key).entries == {entry}


def test_every_kept_manifest_means_what_it_meant() -> None:
    for place in DIRECTORIES:
        found = SignedManifest.from_bytes((place / "manifest.noloco").read_bytes())
        assert isinstance(found.manifest, Manifest)
        with pytest.raises(NolocoError):
            SignedManifest.from_bytes((place / "manifest.noloco").read_bytes()[:-1])


# --- requests of later versions -------------------------------------------------------------------


def test_a_request_that_says_more_is_refused_and_bans_nobody_who_sends_a_few() -> None:
    later = Ready(pair="p")
    object.__setattr__(later, "told", lambda: {"pair": "p", "told_later": 1})

    async def main() -> None:
        async with two_peers() as two:

            async def on_ready(request: Request[Ready]) -> Answer[Done]:
                return Answer(Done())

            two.server.handle(Ready.answered_by(on_ready, Traffic.GOSSIP))
            me = two.caller.transport.peer_id
            for _ in range(BAN_AFTER_STRIKES + 2):
                with pytest.raises(Refused, match="told_later"):
                    await two.ask(later)
            assert not two.server.is_banned(me)
            await two.ask(Ready(pair="p"))
            for _ in range(60):
                with suppress(NolocoError):
                    await two.ask(later)
            assert two.server.is_banned(me)

    run_virtual(main())
