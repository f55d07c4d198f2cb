"""Founding: a preset is what it says, wrong answers cost none of the right ones, and the founder hears who joins."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bootstrap.creating import init_cli, invitation, run
from bootstrap.creating.choosing import RunOptions
from bootstrap.creating.newcomers import Roll
from bootstrap.creating.run import found
from bootstrap.found_cli import app
from node.membership.view import Member
from node.model.stage import described_parameters
from protocol.errors import ManifestError, UserError
from protocol.records.announcement import Announcement, State
from protocol.records.identity import Identity
from protocol.run.manifest import PRESETS, Manifest, load_preset


def test_a_vocabulary_of_which_bytes_would_use_nothing_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"--tokenizer hub:NAME.*--preset llama-125m --vocab 256"):
        RunOptions("llama-125m").resolved()
    assert RunOptions("tiny").resolved()[0] == load_preset("tiny")
    file = tmp_path / "run.toml"
    way_out = ["init", str(file), "--size", "llama-125m", "--vocab", "256", "--yes"]
    assert CliRunner().invoke(app, way_out).exit_code == 0
    assert RunOptions(file=file).resolved()[0].model.vocab_size == 256


def test_a_name_that_counts_the_blocks_alone_is_told_with_the_vocabulary() -> None:
    told = described_parameters(load_preset("llama-125m"))
    assert told == "309.9M parameters (113.3M in its blocks, 196.6M for its vocabulary of 128,002)"


def test_a_written_manifest_is_told_with_its_true_size_and_what_founding_it_takes(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["init", str(tmp_path / "run.toml"), "--size", "llama-1.3b", "--yes"])
    assert "a model of 1.6B parameters and a vocabulary of 128,002 (524M)" in answer.output
    assert "--tokenizer tokenizer.json (or hub:NAME)" in answer.output
    assert "whoever serves stage 0 adds --data FILE" in answer.output
    small = CliRunner().invoke(app, ["init", str(tmp_path / "small.toml"), "--yes"])
    assert "--tokenizer" not in small.output
    assert "--data" not in small.output


def test_only_tiny_trains_on_text_that_everybody_has() -> None:
    sources = {name: load_preset(name).data.source for name in PRESETS}
    assert sources == dict.fromkeys(PRESETS, "local") | {"tiny": "python-stdlib"}


class Terminal:
    @staticmethod
    def isatty() -> bool:
        return True


def asked(file: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> Result:
    monkeypatch.setattr(init_cli, "sys", type("System", (), {"stdin": Terminal}))
    return CliRunner().invoke(app, ["init", str(file)], input="\n".join(answers) + "\n")


def member(number: int, stage: int, state: State = "serving", name: str = "") -> Member:
    said = Announcement(stage=stage, state=state, since=0.0, name=name)
    return Member(Identity.from_seed("roll", number).peer_id, said, 1e12)


def test_the_founder_hears_the_names_that_volunteers_chose_in_a_line_that_nobody_breaks() -> None:
    roll, anna = Roll(1), member(1, 0, name="Anna")
    liar = member(2, 0, name="x\x1b[2J\nAll is well.")
    assert roll.call([anna, liar])[:2] == [
        f"Anna (…{anna.peer[-8:]}) serves stage 0.",
        f"x\\x1b[2J All is well. (…{liar.peer[-8:]}) serves stage 0.",
    ]
    assert roll.call([liar])[0] == f"Anna (…{anna.peer[-8:]}) has left stage 0."


def test_the_founder_hears_who_joins_who_leaves_and_what_is_missing() -> None:
    roll, one, two = Roll(3), member(1, 0), member(2, 2)
    assert roll.call([]) == []
    assert roll.call([one, member(3, 1, "joining")]) == [
        f"…{one.peer[-8:]} serves stage 0.",
        "Missing before anything is trained: stages 1, 2. Here: 1 at stage 0.",
    ]
    assert roll.call([one]) == []
    assert roll.call([one, two])[-1].startswith(
        "Missing before anything is trained: stage 1. Here: 1 at stage 0,"
    )
    everybody = [one, two, member(3, 1)]
    assert roll.call(everybody)[-1] == "All stages are served: 1 at stage 0, 1 at stage 1, 1 at stage 2."
    assert roll.call([two, member(3, 1)]) == [
        f"…{one.peer[-8:]} has left stage 0.",
        "Missing before anything is trained: stage 0. Here: 1 at stage 1, 1 at stage 2.",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_founder_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    founded = found(tmp_path / "run", None)
    address = f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity.from_seed('far').peer_id}"
    run.introduce(founded, [address], None)
    printed = capsys.readouterr().out
    text = " ".join(printed.split())  # sentences go on over lines of a terminal
    assert f"    noloco join {address}\n" in printed
    assert f"{tmp_path / 'run' / 'run.key'} is the run's key." in text
    assert "Keep a copy elsewhere" in text
    assert "295,488 parameters" in text
    assert ("█" in text or "▀" in text) == is_terminal  # a code for cameras
    assert printed.rfind("▀") < printed.index("noloco join")  # it pushes no address off the screen
    run.introduce(found(tmp_path / "run", None), [address], None)
    assert "is the run's key" not in capsys.readouterr().out


FAR, NEAR, HERE = (f"/ip4/{host}/tcp/31337/p2p/P" for host in ("1.2.3.4", "192.168.1.7", "127.0.0.1"))


@pytest.mark.parametrize(
    ("addresses", "named"),
    [([HERE, NEAR, FAR], FAR), ([HERE, NEAR], NEAR), ([HERE], HERE), ([], "ADDRESS")],
)
def test_an_invitation_names_the_address_that_most_can_reach(addresses: list[str], named: str) -> None:
    assert invitation.in_a_line(addresses) == f"noloco join {named}"
    assert invitation.in_a_line(addresses, "noloco-x") == f"noloco join {named} --token noloco-x"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("address", "is_drawn"), [(FAR, True), (NEAR, True), (HERE, False), ("ADDRESS", False)]
)
def test_a_code_is_drawn_of_what_others_can_join_with(address: str, is_drawn: bool) -> None:
    screen, file = Screen(), io.StringIO()
    for where in (screen, file):
        invitation.show_code(f"noloco join {address} --token {'x' * 200}", where)
    assert bool(screen.getvalue()) == is_drawn
    assert not file.getvalue()


@pytest.mark.parametrize("is_private", [True, False])
def test_an_invitation_is_one_line(tmp_path: Path, is_private: bool) -> None:
    """For whom tokens are made, that comes on standard error: what is printed is the token alone, for scripts."""
    manifest = load_preset("tiny")
    access = manifest.access.model_copy(update={"private": is_private})
    founded = found(tmp_path / "run", manifest.model_copy(update={"access": access}))
    invitation.keep_addresses(founded.seed_key.parent, [HERE, FAR])
    answer = CliRunner().invoke(app, ["invite", "--state-dir", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.output
    printed = answer.stdout.strip()
    if is_private:
        assert printed.startswith("noloco-")
        assert f"In one line: noloco join {FAR} --token {printed}" in answer.stderr
    else:
        assert printed == f"noloco join {FAR}"


def test_the_state_directory_is_also_taken_by_its_former_option(tmp_path: Path) -> None:
    founded = found(tmp_path / "run", load_preset("tiny"))
    invitation.keep_addresses(founded.seed_key.parent, [FAR])
    answers = [
        CliRunner().invoke(app, ["invite", name, str(tmp_path / "run")]) for name in ("--state-dir", "--dir")
    ]
    assert answers[0].stdout == answers[1].stdout == f"noloco join {FAR}\n", answers[1].output


@pytest.mark.parametrize(("option", "is_private"), [("--private", True), ("--open", False)])
def test_who_may_join_is_an_option_of_found_as_of_init(
    option: str, is_private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = list[Manifest]()

    def noted(directory: Path, manifest: Manifest, tokenizer: bytes | None) -> None:
        wanted.append(manifest)
        raise UserError("No run is founded here.")

    monkeypatch.setattr(run, "found", noted)
    other = str(tmp_path / "other.toml")
    opposite = "--open" if is_private else "--private"
    assert CliRunner().invoke(app, ["init", other, opposite, "--yes"]).exit_code == 0
    assert RunOptions(file=Path(other)).resolved()[0].access.private is not is_private
    for source in ([], ["--preset", "tiny"], ["--manifest", other]):
        answer = CliRunner().invoke(
            app, [*source, option, "--port", "0", "--state-dir", str(tmp_path / "run")]
        )
        assert "No run is founded here." in answer.output
    assert [manifest.access.private for manifest in wanted] == [is_private] * 3


@pytest.mark.parametrize(("option", "goes_on"), [("--private", True), ("--open", False), ("", True)])
def test_the_same_line_again_goes_on_with_a_run_whatever_its_preset(
    option: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    preset = load_preset("llama-5m")
    found(directory, preset.model_copy(update={"access": preset.access.model_copy(update={"private": True})}))

    async def kept(*arguments: object, **options: object) -> None:
        raise UserError("It would run now.")

    monkeypatch.setattr(run, "keep_seed_peer", kept)
    arguments = [*filter(None, [option]), "--port", "0", "--state-dir", str(directory)]
    answer = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert ("It would run now." if goes_on else "holds run 'llama-5m', which is private") in answer
