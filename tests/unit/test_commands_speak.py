"""Every command explains itself on a screen, with an example; mistakes are one sentence with the next step."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bootstrap.found_cli import app as founding
from bootstrap.tools_cli import app as tools
from node.cli import app as node
from protocol.access.tokens import Token
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset, preset_text
from protocol.run.signed_manifest import SignedManifest

TOKEN = Token.issue("f" * 32, Identity.from_seed("a run"), None, 1, 1e10).to_text()
SCREEN = 40  # lines
EVERY_COMMAND = 48  # lines: of noloco alone, which lists them all
PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWB1nCVQyW3BE4zaVYJexq3mR44ZNQQNjX5Q1yseqVU9z4"
APPS = {"noloco-node": node, "noloco-bootstrap": founding, "noloco": tools}


def commands() -> Iterator[tuple[str, ...]]:
    """Each command with those that it belongs to."""
    for name, app in APPS.items():
        yield (name,)
        yield from ((name, *path) for path in _below(app) if path)


def _below(app: typer.Typer) -> Iterator[tuple[str, ...]]:
    """Where a program is one command alone, that has no name."""
    for command in (command for command in app.registered_commands if not command.hidden):
        callback = command.callback
        assert callback is not None
        if app is not node:
            yield (command.name or callback.__name__.replace("_", "-"),)
    for group in (group for group in app.registered_groups if not group.hidden):
        assert group.typer_instance is not None
        yield (str(group.name),)
        for path in _below(group.typer_instance):
            yield (str(group.name), *path)


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_help_fits_a_screen_and_has_an_example(command: tuple[str, ...]) -> None:
    name, *path = command
    answer = CliRunner().invoke(APPS[name], [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert answer.exit_code == 0, answer.output
    lines = answer.output.splitlines()
    assert len(lines) <= (SCREEN if command != ("noloco",) else EVERY_COMMAND)
    assert max(map(len, lines)) <= 80
    assert "Example: noloco" in answer.output


def test_each_command_is_listed_in_one_line() -> None:
    for name, *path in commands():
        answer = CliRunner().invoke(APPS[name], [*path, "--help"], env={"COLUMNS": "80"})
        _, _, listed = answer.output.partition("Show this message and exit.\n")
        for line in filter(str.strip, listed.splitlines()):
            assert re.fullmatch(r"[A-Z][a-z ]+:|  [a-z]+ {2,}[A-Z].*[^.]\.|  [a-z]+ {2,}[A-Z].*[^.]", line), (
                line
            )


HELP = (
    ("-h", "--help"), ("help", "--help"), ("help join", "join --help"), ("join -h", "join --help"),
    ("help simulate swarm", "simulate swarm --help"), ("simulate help", "simulate --help"),
    ("noloco-bootstrap --help", "found --help"), ("found invite -h", "invite --help"),
)  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), HELP, ids=[typed for typed, _ in HELP])
def test_help_is_asked_for_in_many_ways(typed: str, meant: str) -> None:
    said, wanted = (CliRunner().invoke(tools, line.split()).output for line in (typed, meant))
    assert said.partition("\n\n")[2] == wanted.partition("\n\n")[2]
    assert "Show this message and exit" in said


def test_all_commands_stand_in_groups_where_none_is_named() -> None:
    said = CliRunner().invoke(tools, [], env={"COLUMNS": "80"}).output
    groups = re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE)
    assert groups == ["Options", "Try", "Take part", "Found", "Watch", "Take the model out", "Study"]


def test_join_and_found_are_the_two_programs() -> None:
    """They take and refuse the same, and an address needs no --join before it."""
    for words, program, same in (
        ("join --stage first", node, "--stage first"),
        (f"join {PEER} --max-memory much", node, f"--join {PEER} --max-memory much"),
        ("noloco-node --max-memory much", node, "--max-memory much"),
        ("found --preset llama-70b", founding, "--preset llama-70b"),
    ):
        said, wanted = (
            CliRunner().invoke(app, line.split()).output.splitlines()[-1]
            for app, line in ((tools, words), (program, same))
        )
        assert said == wanted


@pytest.mark.parametrize(
    "line",
    ["status", "links", "contributors", "export --join x --out model", "generate a --model m", "eval --model m",
     "watch --events e", "dashboard --replay .", "manifest check --preset no", "simulate learning -k x"],
)  # fmt: skip
def test_a_tool_says_what_it_does_before_it_loads_anything(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has found out what is wrong, as here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bootstrap.inspect.credentials.running_here", list)
    said = CliRunner().invoke(tools, line.split()).stderr
    assert re.match(r"(Looking|Asking|Getting|Following|Starting|Working|Loading) [^\n]* …\n", said), said


WRONG: list[tuple[str, str, str]] = [  # the command, what is said, and the next step
    ("noloco-node", "Tell this node where the run is", "noloco swarm"),
    (f"noloco-node --join {PEER[:40]}", "is not a peer id", "A right one looks like"),
    (f"noloco-node --join {PEER} --stage first", "Invalid value for '--stage'", "for help"),
    (f"noloco-node --join {PEER} --stage -7", "--stage: it should be greater than or equal to -1", "--help"),
    (f"noloco-node --join {PEER} --port 70000", "--port: it should be less than or equal to 65535", "--help"),
    (
        f"noloco-node --join {PEER} --max-memory much",
        "--max-memory: 'much' is not an amount",
        "write it as 4GiB",
    ),
    (f"noloco-node --join {PEER} --data nothing-*.txt", "No file matches nothing-*.txt", "Check the pattern"),
    (f"noloco-node --join {PEER} --data missing.txt", "'missing.txt' (No such file", "Check the path"),
    (f"noloco-node --join {PEER} --data folder", "folder is a folder", "Name files with text in them"),
    (f"noloco-node --join {PEER} --config none.toml", "none.toml (No such file", "Check --config"),
    (
        f"noloco-node --join {PEER} --config typo.toml",
        "stge in typo.toml: there is no such",
        "Did you mean stage?",
    ),
    (f"noloco-node --join {PEER} --config torn.toml", "torn.toml is not TOML", "Correct that place"),
    (
        f"noloco-node --join {PEER} --announce 203.0.113.7 --port 1",
        "Cannot announce",
        "/ip4/203.0.113.7/tcp/",
    ),
    (f"noloco-node --join {PEER} --host localhost", "Cannot listen on 'localhost'", "--host 0.0.0.0"),
    (f"noloco-node --join {PEER} --host fe80::1%lo", "names an interface", "--host ::"),
    ("noloco-bootstrap --announce '/ip4/203.0.113.7/tcp/1'", "has quotes around it", "leave them out"),
    ("noloco-bootstrap --announce /ip4/203.0.113.7/udp/1/quic", "Cannot announce", "looks like /ip4/"),
    ("noloco-bootstrap --host 127.0.0.300", "not an IP address", "Try --host"),
    ("NOLOCO_JION=x noloco-node", "NOLOCO_JION is not a setting", "Did you mean NOLOCO_JOIN?"),
    (f"NOLOCO_STAGE=first noloco-node --join {PEER}", "NOLOCO_STAGE: it should be a valid integer", "--help"),
    ("noloco-bootstrap --preset llama-70b", "There is no preset 'llama-70b'", "Choose one of: tiny"),
    ("noloco-bootstrap --preset llama-125m", "of which bytes would use 256", "--tokenizer"),
    ("noloco-bootstrap --preset tiny --manifest wrong.toml", "not both", "Give either"),
    ("noloco-bootstrap --manifest wrong.toml", "outer.gama is not a setting", 'Did you mean "gamma"?'),
    ("noloco-bootstrap --manifest none.toml", "none.toml (No such file", "Check the path"),
    ("noloco-bootstrap --manifest named.toml", "name cannot be 'my run'", "as my-run.1"),
    ("noloco-bootstrap init named.toml --yes", "named.toml exists already", "--force"),
    ("noloco-bootstrap init new.toml", "There is no terminal", "--yes"),
    ("noloco-bootstrap init new.toml --yes --heads 3", "heads", "hidden_size"),
    ("noloco-bootstrap --tokenizer empty.json", "empty.json is empty", "name another tokenizer.json"),
    ("noloco-bootstrap --tokenizer typo.toml", "typo.toml is not JSON", "Name a Hugging Face tokenizer.json"),
    (
        "noloco-bootstrap --tokenizer /dev/null",
        "Cannot read /dev/null (it is a pipe or a device)",
        "Write it to a file",
    ),
    (f"noloco-node --join {PEER} --config latin.toml", "latin.toml is not UTF-8 text", "Save it as UTF-8"),
    ("noloco-bootstrap --manifest latin.toml", "latin.toml is not UTF-8 text", "save it as UTF-8"),
    ("noloco manifest check", "Name either a manifest file or a preset", "--preset tiny"),
    ("noloco manifest check wrong.toml", "outer.gama is not a setting", 'Did you mean "gamma"?'),
    ("noloco manifest check --preset tiny --device 9090", "The device '9090' is unknown", "Known devices"),
    ("noloco manifest check --preset tiny --uplink fast", "'fast' is not a bandwidth", "write it as 20Mbit"),
    ("noloco status", "Name the run", "--join /ip4/"),
    ("noloco export --out model", "run", "--join"),
    ("noloco generate Once", "Name the model", "--model DIRECTORY"),
    ("noloco generate Once --model m --tokens 0", "--tokens must be", "1 or more"),
    ("noloco eval", "run", "--join"),
    ("noloco eval --model m --tokenizer hub:a/t", "--tokenizer is for a running swarm", "leave it out"),
    ("noloco eval --model m --every-replica", "--every-replica is for a running swarm", "leave it out"),
    (
        "noloco-bootstrap --address-file typo.toml/a.txt",
        "Cannot write typo.toml/a.txt",
        "Choose another --address-file",
    ),
    ("noloco-bootstrap --address-file folder", "Cannot write folder", "Choose another --address-file"),
    ("noloco swarm --summary folder", "Cannot write folder", "Choose another --summary"),
    (
        "noloco swarm --trace typo.toml/t.json",
        "Cannot write typo.toml/t.json",
        "Choose another --trace",
    ),
    ("noloco simulate swarm lab-9", "There is no preset 'lab-9'", "Choose one of: lab-8"),
    ("noloco simulate swarm none.toml", "none.toml (No such file", "Check the path"),
    ("noloco plan", "Give either --scenario FILE", "--join ADDRESS"),
    ("noloco plan --scenario none.json --picture plan.jpg", "Cannot draw plan.jpg", ".svg"),
    ("noloco trace none.json", "none.json", "noloco join --trace"),
    ("noloco doctor --self nowhere", "no daemon runs with the state directory nowhere", "just started"),
    (f"noloco-node --join {PEER} --bogus", "No such option: --bogus", "for help"),
    ("noloco-node --join 203.0.113.7:31337", "Cannot use the address '203.0.113.7:31337'", "A right one"),
    ("noloco-node --join /ip4/300.0.0.1/tcp/1/p2p/12D3", "'300.0.0.1' is not an address", "A right one"),
    (f"noloco-node --join {PEER} --max-upload 20", "'20' is not a bandwidth", "write it as 20Mbit"),
    (f"noloco-node --join {PEER} --max-download -3Mbit", "'-3Mbit' is not a bandwidth", "write it as 20Mbit"),
    (
        f"noloco-node --join {PEER} --max-memory 20",
        "'20' would be 20 bytes",
        "write it with its unit, as 20GiB",
    ),
    (f"noloco-node --join {PEER} --max-memory 150%", "'150%' is no share of the memory", "write it as 50%"),
    (f"noloco-node --join {PEER} --monthly-cap 500", "'500' would be 500 bytes", "as 500GiB"),
    (f"noloco-node --join {PEER} --hours 25-3", "'25-3' are no hours", "write them as 22-07"),
    (f"noloco-node --join {PEER} --hours evening", "'evening' are no hours", "write them as 22-07"),
    (
        f"noloco-node --join {PEER} --threads -2",
        "--threads: it should be greater than or equal to 0",
        "--help",
    ),
    (
        f"noloco-node --join {PEER} --checkpoint-minutes 0",
        "--checkpoint-minutes: it should be greater",
        "--help",
    ),
    (f"noloco-node --join {PEER} --name {'x' * 33}", "--name: it should have at most 32", "--help"),
    (f"noloco-node --join {PEER} --run mine", "'mine' is not a run's id", "copy its 32 digits"),
    (f"noloco-node --join {PEER} --token torn", "This is not a token", "Copy it again"),
    (
        f"noloco-node --join {PEER} --token {TOKEN} --run {'0' * 32}",
        "The token is for run",
        "leave --run out",
    ),
    (f"noloco-node --join {PEER} --dashboard here", "'here' is not HOST:PORT", "127.0.0.1:8080"),
    (f"noloco-node --join {PEER} --device cuda:9", "'cuda:9' cannot be used here", "--device cpu"),
    (f"noloco-node --join {PEER} --state-dir typo.toml", "Cannot use the directory typo.toml", "--state-dir"),
    (f"noloco-node --join {PEER} --state-dir /proc/x", "Cannot use the directory /proc/x", "--state-dir"),
    (f"noloco-node --join {PEER} --trace none/t.json", "Cannot write the trace none/t.json", "--trace"),
    (f"noloco-node --join {PEER} --host 127.0.0.1 --port TAKEN", "TAKEN is in use", "another --port"),
    ("noloco-bootstrap --host 127.0.0.1 --port TAKEN", "TAKEN is in use", "another --port"),
    ("noloco-bootstrap --manifest large.toml", "of which bytes would use 256", "set model.vocab_size = 256"),
    ("noloco-bootstrap --state-dir /proc/x --preset tiny", "Cannot use the directory /proc/x", "--state-dir"),
    (
        "noloco-bootstrap --state-dir altered",
        "altered/manifest.noloco cannot be used",
        "Restore it from a copy",
    ),
    (
        "noloco-bootstrap invite --state-dir keyed",
        "keyed/run.key is the key of another run",
        "put its run.key back",
    ),
    ("noloco-bootstrap revoke --state-dir keyed x", "keyed/run.key is the key of another run", "--state-dir"),
    ("noloco-bootstrap invite --state-dir folder", "Cannot read folder/manifest.noloco", "--state-dir"),
    ("noloco-bootstrap invite --uses 0", "Invalid value for '--uses'", "for help"),
    (
        "noloco-bootstrap init new.toml --yes --layers -1",
        "model.layers cannot be used",
        "greater than or equal to 1",
    ),
    ("noloco-bootstrap init new.toml --yes --stages 99", "stages 99 exceeds model.layers", "lower it"),
    ("noloco-bootstrap init none/new.toml --yes", "Cannot write none/new.toml", "Choose another file"),
    ("noloco swarm --steps -4", "Invalid value for '--steps'", "for help"),
    ("noloco manifest check --preset tiny --uplink 20", "'20' is not a bandwidth", "write it as 20Mbit"),
    ("noloco manifest check --preset tiny --replicas -1", "Invalid value for '--replicas'", "for help"),
    ("noloco export --join x --out model", "Cannot use the address 'x'", "A right one looks like"),
    (f"noloco export --join {PEER} --out typo.toml", "typo.toml (it is a file)", "Choose another --out"),
    (f"noloco export --join {PEER} --out /proc/x", "Cannot write to /proc/x", "Choose another --out"),
    ("noloco generate Once --model folder", "folder is empty", "Give the folder"),
    ("noloco trace folder", "Cannot read folder (it is a folder)", "Name a file"),
    ("noloco node pause --state-dir none", "no daemon runs with the state directory none", "--state-dir"),
    ("noloco stauts", "No such command 'stauts'", "--help"),
    ("noloco joyn", "No such command 'joyn'", "Did you mean: noloco join?"),
    ("noloco pause", "No such command 'pause'", "Did you mean: noloco node pause?"),
    ("noloco-bootstrap invitee", "No such command 'invitee'", "Did you mean: noloco-bootstrap invite"),
    ("noloco-node help", "'help' is a word where the address", "noloco join --help"),
    (f"noloco-node join {PEER}", "'join' is a word where the address", "noloco join --help"),
    ("noloco join 203.0.113.7:31337", "Cannot use the address '203.0.113.7:31337'", "A right one"),
]


@pytest.mark.parametrize(
    ("line", "said", "step"), WRONG, ids=[line.replace(TOKEN, "TOKEN") for line, _, _ in WRONG]
)
def test_a_mistake_is_one_sentence_with_the_next_step(
    line: str, said: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bootstrap.inspect.credentials.running_here", list)
    (tmp_path / "folder").mkdir()
    text = preset()
    for name, contents in (
        ("typo.toml", "stge = 1\n"),
        ("torn.toml", "stage = = 1\n"),
        ("wrong.toml", text.replace("gamma =", "gama =")),
        ("named.toml", text.replace('name = "tiny"', 'name = "my run"')),
        ("large.toml", preset("llama-125m")),
    ):
        (tmp_path / name).write_text(contents, encoding="utf-8")
    (tmp_path / "empty.json").touch()
    (tmp_path / "latin.toml").write_bytes("# größer\n".encode("latin-1"))
    run_folders(tmp_path)
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    words, said = line.replace("TAKEN", port).split(), said.replace("TAKEN", port)
    if "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "noloco-bootstrap" and words[1].startswith("--") and "--port" not in words:
        words += ["--port", "0"]  # whoever has the usual one
    answer = CliRunner().invoke(APPS[words[0]], words[1:], env={"COLUMNS": "200"}, prog_name=words[0])
    taken.close()
    told = " ".join(answer.output.split())
    assert answer.exit_code, told
    assert said in told
    assert step in told
    assert not re.search(r"Traceback|\[Errno|pydantic|Extra inputs|should match pattern", told)
    assert answer.exception is None or isinstance(answer.exception, SystemExit)


def run_folders(folder: Path) -> None:
    """Two directories of founded runs: one whose manifest was altered, one with the key of another run."""
    manifest = load_preset("tiny")
    manifest = manifest.model_copy(update={"access": manifest.access.model_copy(update={"private": True})})
    signed = SignedManifest.sign(manifest, Identity.from_seed("a run")).to_bytes()
    altered = bytearray(signed)
    altered[len(altered) // 2] ^= 1
    for name, contents in (("altered", bytes(altered)), ("keyed", signed)):
        (folder / name).mkdir()
        (folder / name / "manifest.noloco").write_bytes(contents)
    Identity.load_or_create(folder / "keyed" / "run.key")


def preset(name: str = "tiny") -> str:
    return preset_text(name)
