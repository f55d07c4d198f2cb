"""`noloco-bootstrap init`: what it writes can be checked and founded, and wrong answers are one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bootstrap import found_cli
from bootstrap.checking.manifest_cli import app as manifest_app
from bootstrap.creating import init_cli
from bootstrap.creating.init_cli import MEANINGS, toml_of
from bootstrap.creating.run import found
from bootstrap.found_cli import app
from protocol.run.manifest import PRESETS, Manifest, load_preset, load_toml, manifest_from

MOST_QUESTIONS = 8


def run(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=answers)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_as_written_is_the_preset(preset: str) -> None:
    manifest = load_preset(preset)
    assert manifest_from(tomllib.loads(toml_of(manifest, "run.toml"))) == manifest


def test_what_flags_ask_for_is_written_checked_and_founded(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    flags = "--name mine --size tiny --hidden 128 --heads 8 --kv-heads 2 --stages 4 --sequence-tokens 256"
    answer = run(str(file), *flags.split(), "--steps", "200", "--learning-rate", "0.001", "--yes")
    assert answer.exit_code == 0, answer.output
    assert f"noloco found --manifest {file}" in answer.output
    manifest = load_toml(file)
    model = manifest.model
    assert (manifest.name, manifest.stages, model.hidden_size, model.kv_heads) == ("mine", 4, 128, 2)
    assert (model.intermediate_size, manifest.inner.warmup_steps) == (512, 20)
    checked = CliRunner().invoke(manifest_app, ["check", str(file)])
    assert checked.exit_code == 0, checked.output
    assert found(tmp_path / "run", manifest).signed.manifest == manifest


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who can be asked: typer's runner gives the answers, but no terminal."""
    system = type("System", (), {"stdin": type("Terminal", (), {"isatty": staticmethod(lambda: True)})})
    monkeypatch.setattr(init_cli, "sys", system)
    monkeypatch.setattr(found_cli, "sys", system)


@pytest.mark.usefixtures("terminal")
def test_questions_have_answers_to_press_enter_for(tmp_path: Path) -> None:
    file = tmp_path / "asked.toml"
    answer = run(str(file), "--stages", "4", answers="\n" * MOST_QUESTIONS)
    assert answer.exit_code == 0, answer.output
    manifest = load_toml(file)
    assert (manifest.name, manifest.stages, manifest.data.source) == ("my-run", 4, "python-stdlib")
    assert not manifest.access.private


@pytest.mark.usefixtures("terminal")
def test_each_answer_is_checked_at_once_and_none_is_lost(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The cat sat on the mat, and then it ran away.\n" * 200)
    text = str(tmp_path / "texts")
    answers = f"my run\nours\nnix\n{text}\n\nwho\ninvited\nmany\n3\nmuch\n16GB\nlong\n30 min\nhuge\ntiny\n"
    answer = run(str(tmp_path / "ours.toml"), answers=answers)
    assert answer.exit_code == 0, answer.output
    for problem in (
        "Did you mean my-run?", "hub:NAME.\nText", "Answer anybody, or invited", "Answer with a number",
        "Answer as 8GB", "Answer as 30min", "Choose one of: tiny",
    ):  # fmt: skip
        assert problem in answer.output
    assert answer.output.count("Name of the run") == 2
    assert "Fits 3 machines of 16 GB, at least one replica a stage" in answer.output
    manifest, raw = load_toml(tmp_path / "ours.toml"), (tmp_path / "ours-tokenizer.json").read_bytes()
    assert (manifest.name, manifest.access.private, manifest.data.source) == ("ours", True, "local")
    assert found(tmp_path / "run", manifest, raw).signed.manifest.data.tokenizer.startswith("sha256:")
    assert f"--data {text}" in answer.output


@pytest.mark.usefixtures("terminal")
def test_founding_without_a_manifest_asks_the_same_and_founds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the seed peer, which is not started here: the port is refused."""
    monkeypatch.chdir(tmp_path)
    answers = "friends\n\n\ninvited" + "\n" * MOST_QUESTIONS
    answer = CliRunner().invoke(app, ["--host", "192.0.2.1"], input=answers)
    assert "Who may join" in answer.output
    assert "Fits 4 machines" in answer.output
    assert "This machine has no address 192.0.2.1" in answer.output


def test_every_explained_setting_exists() -> None:
    settings = Manifest.model_fields
    for place in MEANINGS:
        section, _, name = place.partition(".")
        assert section in settings
        assert not name or name in getattr(load_preset("tiny"), section).model_dump()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hidden", "130"), "multiple of model.heads"),
        (("--stages", "40"), "lower it"),
        (("--size", "huge"), "Choose one of: tiny"),
        (("--name", "a b"), "name"),
        (("--steps", "0"), "total_steps"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_written(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run(str(tmp_path / "run.toml"), *arguments, "--yes")
    assert answer.exit_code == 2
    assert said in answer.output
    assert not (tmp_path / "run.toml").exists()


def test_a_file_is_not_replaced_by_accident(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mine")
    refused = run(str(file), "--yes")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert file.read_text() == "mine"
    assert run(str(file), "--yes", "--force").exit_code == 0
    nowhere = run(str(tmp_path / "no" / "run.toml"), "--yes")
    assert nowhere.exit_code == 2
    assert "Cannot write" in nowhere.output


def test_where_nobody_can_be_asked_flags_are_needed(tmp_path: Path) -> None:
    refused = run(str(tmp_path / "run.toml"))
    assert refused.exit_code == 2
    assert "--yes" in refused.output
