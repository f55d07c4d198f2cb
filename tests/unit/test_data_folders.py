"""A folder that --data names: what lies beside rows is none, and a refusal says what to name in its place."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from node.data.documents import Split, stored_documents
from node.data.sources import documents_in, places_of
from node.storage.state_directory import StateDirectory
from protocol.errors import DataError
from tests.pretrained import saved_model
from tests.unit.corpora import as_hub_layout, as_jsonl

TEXT = "a text that is long enough to be one\n"


def read(*entries: str | Path) -> list[str]:
    return [b"".join(blocks).decode() for blocks in documents_in(places_of(list(map(str, entries))), "text")]


def refusal(entry: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(entry)
    said = str(caught.value)
    assert "\n" not in said
    return said


def named_in(said: str) -> str:
    """What the refusal says to give --data."""
    found = re.search(r"--data (.*?)\.$", said)
    assert found, said
    (word,) = shlex.split(found[1])
    return word


@pytest.mark.parametrize(
    "stray",
    ["dataset_infos.json", "dataset_info.json", "config.json", "package.json", "tokenizer_config.json"],
)
def test_what_lies_beside_rows_is_none_of_them(stray: str, tmp_path: Path) -> None:
    for folder in ("rows", "texts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / stray).write_text(json.dumps({"default": {"features": {}}}))
        (tmp_path / folder / ".DS_Store").write_bytes(b"\0\0\0\x01Bud1")
    as_jsonl(tmp_path / "rows" / "a.jsonl", [TEXT])
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    assert read(tmp_path / "rows") == read(tmp_path / "texts") == [TEXT]


@pytest.mark.parametrize(
    ("stray", "contents"),
    [("metadata.json", '{"files": 3}'), ("index.csv", "file,author\na.txt,me\n"), ("a.jsonl", '{"x": 1}\n')],
)
@pytest.mark.parametrize("kind", ["texts", "deep texts", "rows", "compressed rows", "markdown"])
def test_a_stray_file_is_named_with_what_to_name_instead(
    kind: str, stray: str, contents: str, tmp_path: Path
) -> None:
    folder = tmp_path / "my data"
    (folder / "deep").mkdir(parents=True)
    (folder / stray).write_text(contents)
    for number in range(3):
        if kind == "rows":
            as_jsonl(folder / f"{number}.ndjson", [TEXT])
        elif kind == "compressed rows":
            as_jsonl(folder / f"{number}.ndjson.gz", [TEXT])
        else:
            ending = "md" if kind == "markdown" else "txt"
            (folder / ("deep" if kind == "deep texts" else ".") / f"{number}.{ending}").write_text(TEXT)
    said = refusal(folder)
    assert str(folder / stray) in said
    assert read(named_in(said)) == [TEXT] * 3, "the advice, followed"


def test_a_stray_file_among_its_like_is_named_with_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    as_jsonl(tmp_path / "b.jsonl", [TEXT])
    assert read(named_in(refusal(tmp_path))) == [TEXT]


@pytest.mark.parametrize("ending", ["md", "rst", "py", "text"])
def test_a_folder_of_other_texts_is_answered_with_a_glob(ending: str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "README").write_text("read me")
    for number in range(3):
        (tmp_path / "deep" / f"{number}.{ending}").write_text(TEXT)
    said = refusal(tmp_path)
    assert "is a folder, and nothing in it is known to be text: there is 0." in said
    assert read(named_in(said)) == [TEXT] * 3


def test_a_readme_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(TEXT)
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\x01Bud1")
    assert read(named_in(refusal(tmp_path))) == [TEXT]


def test_a_folder_of_what_is_no_text_says_what_it_is(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.pdf").write_bytes(b"%PDF-1.4\n")
    said = refusal(tmp_path)
    assert "there is 0.pdf, and 2 more. That is a PDF document. Make text of it: pdftotext" in said


def test_an_empty_folder_and_one_with_hidden_files(tmp_path: Path) -> None:
    assert "is a folder that has no files" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "is a folder that has no files" in refusal(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "a.txt").write_text(TEXT)
    assert "has hidden files alone, as .cache" in refusal(tmp_path)


def test_a_checkpoint_is_no_text(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    (tmp_path / "model" / "merges.txt").write_text("#version: 0.2\na b\n")
    assert "is a model's checkpoint (model.safetensors), not texts. --from-checkpoint" in refusal(
        tmp_path / "model"
    )


@pytest.mark.parametrize("name", ["manifest.noloco", "identity.key", "run.key", "seed.key"])
def test_what_this_program_keeps_is_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).write_bytes(b"\0")
    (tmp_path / "state" / "events.jsonl").write_text('{"event": "round"}\n')
    for folder in (tmp_path / "state", tmp_path):
        assert f"is a folder of noloco's own files ({name})" in refusal(folder)


def test_a_nodes_directory_and_its_documents_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    stored_documents([str(tmp_path / "a.txt")], "text", 16_384, Split(0.0), tmp_path / "cache")
    (store,) = [found for found in (tmp_path / "cache").iterdir() if found.is_dir()]
    assert "noloco's own files (text.bin)" in refusal(store)
    state = StateDirectory(tmp_path / "state")
    state.open()
    state.identity_path.write_bytes(b"key")
    state.close()
    assert "noloco's own files (identity.key)" in refusal(tmp_path / "state")


def test_a_dataset_of_the_hub_is_read_as_before(tmp_path: Path) -> None:
    place = as_hub_layout(tmp_path / "hub", [TEXT] * 2)
    (tmp_path / "hub" / "dataset_infos.json").write_text("{}")
    assert read(place) == [TEXT] * 2
