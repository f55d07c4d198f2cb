"""The commands that a refused file is answered with, typed as they stand: the text can be trained on after them."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from node.data.sources import documents_in
from protocol.errors import DataError
from tests.unit.test_conversion import SEVEN_BITS, refusal

TEXT = "größer, and a second\nline\n"


def texts_in(path: Path) -> list[str]:
    return [b"".join(document).decode() for document in documents_in([path], "text")]


def made(kind: str, folder: Path) -> Path:
    path = folder / f"it's a {kind}"
    (folder / "inner.txt").write_text(TEXT)
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(folder / "inner.txt", "inner.txt")
    elif kind == "tar.gz":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(folder / "inner.txt", "inner.txt")
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(TEXT.encode(kind.removesuffix(".gz"))))
    else:
        path.write_bytes(TEXT.encode(kind))
    return path


@pytest.mark.parametrize(
    "kind",
    ["zip", "tar.gz", "latin-1", "utf-16", "utf-16-le", "utf-32", "utf-32-be", "utf-16.gz", "latin-1.gz"],
)
def test_the_advice_followed(kind: str, tmp_path: Path) -> None:
    path = made(kind, tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(DataError) as refusal:
        texts_in(path)
    command = str(refusal.value).rpartition(": ")[2].removesuffix(".")
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    subprocess.run(["bash", "-c", command], check=True, cwd="/", timeout=60)
    (result,) = set(tmp_path.iterdir()) - before
    assert texts_in(result) == [TEXT]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("encoding", SEVEN_BITS)
def test_letters_in_seven_bits_are_no_text_as_they_are(encoding: str, name: str, tmp_path: Path) -> None:
    codec, text = SEVEN_BITS[encoding]
    rows = {
        "a.txt": text,
        "a.jsonl": f'{{"text": "{text.strip().splitlines()[0]}"}}\n' * 5,
        "a.csv": f"text\n{text}",
    }
    raw = rows[name].encode(codec)
    assert raw.isascii()
    (tmp_path / name).write_bytes(b"The first lines are ASCII.\n" * 3 + raw if name == "a.txt" else raw)
    said = refusal(tmp_path / name)
    assert f"is {encoding} text. Convert it: " in said
    command = said.partition("Convert it: ")[2].removesuffix(".")
    subprocess.run(command, shell=True, check=True)
    converted = (tmp_path / f"utf8-{name}").read_bytes().decode()
    assert converted.endswith(rows[name])
