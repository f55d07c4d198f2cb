"""What is no text is named as what it is, however its name ends, and no advice makes text of its bytes."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import shlex
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from node.data.beginnings import KINDS, kind_of
from node.data.sources import documents_in
from protocol.errors import DataError


def archive(*names: str, mark: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            stored = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            packed.writestr(name, mark if name == "mimetype" else b"<xml/>" * 20, stored)
    return out.getvalue()


def tarred() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        packed.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return out.getvalue()


def saved_by_numpy(*, several: bool) -> bytes:
    out = io.BytesIO()
    (np.savez if several else np.save)(out, np.arange(9))
    return out.getvalue()


def saved_by_torch() -> bytes:
    out = io.BytesIO()
    torch.save({"a": torch.ones(3)}, out)
    return out.getvalue()


def sqlite(folder: Path) -> bytes:
    with sqlite3.connect(folder / "made.db") as database:
        database.execute("create table texts (text)")
    database.close()
    return (folder / "made.db").read_bytes()


REST = bytes(range(256)) * 4
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
ODF = b"application/vnd.oasis.opendocument."
BEGINNINGS: dict[str, tuple[bytes, str]] = {
    "LFS": (LFS, "lfs pull"),
    "LFS of Windows": (LFS.replace(b"\n", b"\r\n"), "lfs pull"),
    "annex": (b"/annex/objects/SHA256E-s1--0.jsonl\n", "annex get"),
    "armoured GPG": (b"-----BEGIN PGP MESSAGE-----\n\nhQEMA\n", "Decrypt"),
    "GPG": (b"\x85\x01\x0c\x03" + REST, "Decrypt"),
    "GPG with a passphrase": (b"\x8c\x0d\x04\x09\x03\x08" + REST, "Decrypt"),
    "age": (b"age-encryption.org/v1\n-> X25519\n", "Decrypt"),
    "openssl": (b"Salted__" + REST, "Decrypt"),
    "git-crypt": (b"\0GITCRYPT\0" + REST, "Decrypt"),
    "PDF": (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj\n<< /Type /Catalog >>\nendobj\n" * 40, "pdftotext"),
    "PDF of ASCII": (b"%PDF-1.4\n1 0 obj\n", "pdftotext"),
    "PDF behind a mark": (b"\xef\xbb\xbf%PDF-1.4\n1 0 obj\n", "pdftotext"),
    "PostScript": (b"%!PS-Adobe-3.0\n", "ps2ascii"),
    "DjVu": (b"AT&TFORM" + REST, "djvutxt"),
    "docx": (archive("[Content_Types].xml", "_rels/.rels", "word/document.xml"), "pandoc -f docx"),
    "docx of Google": (archive("_rels/.rels", "word/document.xml"), "pandoc -f docx"),
    "xlsx": (archive("[Content_Types].xml", "_rels/.rels", "xl/workbook.xml"), "as CSV"),
    "pptx": (archive("[Content_Types].xml", "_rels/.rels", "ppt/presentation.xml"), "as plain text"),
    "odt": (archive("mimetype", "content.xml", mark=ODF + b"text"), "pandoc -f odt"),
    "ods": (archive("mimetype", "content.xml", mark=ODF + b"spreadsheet"), "as CSV"),
    "epub": (archive("mimetype", "a.html", mark=b"application/epub+zip"), "pandoc -f epub"),
    "mobi": (b"title".ljust(60, b"\0") + b"BOOKMOBI" + REST, "ebook-convert"),
    "doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + REST, "as plain text"),
    "JPEG": (b"\xff\xd8\xff\xe0\x10JFIF\x01" + bytes(range(1, 256)) * 20, "picture"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + REST, "picture"),
    "GIF": (b"GIF89a\x10\x00\x10\x00" + REST, "picture"),
    "WebP": (b"RIFF\x24\x00\x00\x00WEBPVP8 " + REST, "picture"),
    "TIFF": (b"II*\0\x08\0\0\0" + REST, "picture"),
    "big-endian TIFF": (b"MM\0*\0\0\0\x08" + REST, "picture"),
    "BMP": (b"BM\x36\x10\x0e\0\0\0\0\0\x36\0\0\0" + REST, "picture"),
    "ICO": (b"\0\0\x01\0\x01\0\x10\x10" + REST, "picture"),
    "HEIC": (b"\0\0\0\x18ftypheic" + REST, "picture"),
    "AVIF": (b"\0\0\0\x20ftypavif" + REST, "picture"),
    "PSD": (b"8BPS\0\x01" + REST, "picture"),
    "MP3": (b"ID3\x03\0\0\0" + REST, "sound"),
    "MP3 without tags": (b"\xff\xfb\x90\x64" + REST, "sound"),
    "WAV": (b"RIFF\x24\x08\0\0WAVEfmt " + REST, "sound"),
    "FLAC": (b"fLaC\0\0\0\x22" + REST, "sound"),
    "OGG": (b"OggS\0\x02" + REST, "sound"),
    "AIFF": (b"FORM\0\0\x10\0AIFF" + REST, "sound"),
    "MP4": (b"\0\0\0\x18ftypmp42" + REST, "video"),
    "MOV": (b"\0\0\0\x14ftypqt  " + REST, "video"),
    "MKV": (b"\x1aE\xdf\xa3" + REST, "video"),
    "AVI": (b"RIFF\x24\x08\0\0AVI LIST" + REST, "video"),
    "WMV": (b"0&\xb2u\x8ef\xcf\x11" + REST, "video"),
    "TTF": (b"\0\x01\0\0\0\x12" + REST, "font"),
    "WOFF": (b"wOF2\0\x01" + REST, "font"),
    "npy": (saved_by_numpy(several=False), "NumPy"),
    "npz": (saved_by_numpy(several=True), "NumPy"),
    "pt": (saved_by_torch(), "torch"),
    "pickle 5": (pickle.dumps(["text"], 5), "pickle"),
    "pickle 2": (pickle.dumps({"text": "a"}, 2), "pickle"),
    "pickle 0": (pickle.dumps(["text"], 0), "pickle"),
    "safetensors": (save({"a": torch.ones(3)}), "safetensors"),
    "GGUF": (b"GGUF\x03\0\0\0" + REST, "GGUF"),
    "Megatron": (b"MMIDIDX\0\0\x01" + REST, "Megatron"),
    "LMDB": (bytes(16) + b"\xde\xc0\xef\xbe\x01\0\0\0" + REST, "database"),
    "DuckDB": (b"12345678DUCK\x40\0\0\0" + REST, "database"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + REST, "HDF5"),
    "ORC": (b"ORC\x0a\x0b" + REST, "ORC"),
    "Avro": (b"Obj\x01\x04\x16avro.schema" + REST, "Avro"),
    "Feather": (b"FEA1" + REST, "Feather"),
    "TFRecord": (b"\x50\0\0\0\0\0\0\0abcd\x0a\x4e\x0a\x4c" + REST, "TFRecord"),
    "Stata": (b"<stata_dta><header>", "CSV"),
    "plist": (b"bplist00" + REST, "property list"),
    ".DS_Store": (b"\0\0\0\x01Bud1" + REST, "property list"),
    "zip": (archive("a.jpg", "b.jpg"), "unzip"),
    "empty zip": (archive(), "unzip"),
    "jar": (archive("META-INF/MANIFEST.MF", "A.class"), "Java"),
    "tar": (tarred(), "tar -xf"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + REST, "7z x"),
    "rar": (b"Rar!\x1a\x07\x01" + REST, "7z x"),
    "ar": (b"!<arch>\ndebian-binary", "7z x"),
    "cab": (b"MSCF\0\0\0\0" + REST, "7z x"),
    "lz4": (b"\x04\x22\x4d\x18" + REST, "lz4 -dc"),
    "lzip": (b"LZIP\x01" + REST, "lzip -dc"),
    "lzma": (b"\x5d\0\0\x80\0" + b"\xff" * 8 + REST, "xz --format=lzma"),
    "Z": (b"\x1f\x9d\x90" + REST, "gzip -dc <"),
    "ELF": (b"\x7fELF\x02\x01" + REST, "program"),
    "PE": (b"MZ\x90\0\x03" + REST, "program"),
    "Mach-O": (b"\xcf\xfa\xed\xfe" + REST, "program"),
    "Java class": (b"\xca\xfe\xba\xbe\0\0" + REST, "program"),
    "wasm": (b"\0asm\x01\0\0\0" + REST, "program"),
    "pyc": (b"\xa7\x0d\r\n\0\0\0\0" + REST, "program"),
}  # fmt: skip
NAMES = ("a.txt", "a.pdf", "a.jsonl", "a.csv", "a.parquet", "a", "it's mine.bin")


def read(path: Path) -> list[str]:
    return [b"".join(document).decode() for document in documents_in([path], "text")]


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    said = str(caught.value)
    assert "\n" not in said
    assert "iconv" not in said
    assert len(said) < 500
    return said


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_each_kind_is_named_with_what_helps(kind: str, tmp_path: Path) -> None:
    contents, helps = BEGINNINGS[kind]
    for name in NAMES:
        (tmp_path / name).write_bytes(contents)
        said = refusal(tmp_path / name)
        assert said.startswith(f"{tmp_path / name} is ")
        assert "not text" in said
        assert helps in said
        if (command := said.rpartition(": ")[2].removesuffix(".")).startswith(
            ("pdftotext", "pandoc", "unzip")
        ):
            assert str(tmp_path / name) in shlex.split(command)


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_each_kind_is_known_behind_iconv_and_gzip(kind: str, tmp_path: Path) -> None:
    """Whoever made UTF-8 of its bytes has not made text of it."""
    contents, _ = BEGINNINGS[kind]
    (tmp_path / "utf8-a.txt").write_bytes(contents.decode("latin-1").encode())
    assert "not text" in refusal(tmp_path / "utf8-a.txt")
    (tmp_path / "a.gz").write_bytes(gzip.compress(contents))
    said = refusal(tmp_path / "a.gz")
    assert ("tar -xf" if kind == "tar" else "decompress it first: gzip -dc ") in said


def test_an_sqlite_database_is_named_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(sqlite(tmp_path))
    assert "is an SQLite database, not text. Write its texts as CSV: sqlite3 -csv" in refusal(
        tmp_path / "a.db"
    )


def test_each_kind_has_its_test(tmp_path: Path) -> None:
    found = {kind_of(contents) for contents, _ in BEGINNINGS.values()} | {kind_of(sqlite(tmp_path))}
    untested = {"compressed with lzop", "compressed with snappy"}
    assert {kind.name for kind in KINDS} - {kind.name for kind in found if kind} == untested


@pytest.mark.parametrize(
    "text",
    [
        "BMW ist ein Wort.", "MZ is how programs begin", "GIF89a is a format", "ORCs are green", "II* and MM*",
        "ID3 tags", "RIFF and the WAVE", "FORM 27 AIFA", "PK is a name", "Rar! she said", "The big DUCK went",
        "GGUF, too",
        "PDF-1.4 is old", "Obj is short", "version 2 of https://git-lfs.github.com/",
        "<html><p>Markup</p></html>",
        r"{\rtf1 markup}", "#!/bin/sh\n", "SEQ 1", "LZIP it",
        "(lp and so on", "Ã¿Ã˜ was read wrongly",
        "-----BEGIN PGP SIGNED MESSAGE-----\ntext", "wOFF", "\x1b[31mred\x1b[0m in a log", "a\x0cpage",
        "07070 is a number", "ÿØ, ÿ!",
        "ясно и просто", "OTTO and the others", "DUCKDUCKDUCK", "hsqs", "REDIS is a server",
    ],
)  # fmt: skip
def test_texts_that_begin_a_little_like_them_are_texts(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("encoding", ["cp1251", "cp1252", "koi8-r", "shift-jis", "gb18030"])
def test_other_encodings_are_no_kind_of_file(encoding: str, tmp_path: Path) -> None:
    text = {
        "cp1252": "ÿñ größer – “quoted”\n",
        "shift-jis": "日本語の文章\n",
        "gb18030": "道可道，非常道\n",
    }.get(encoding, "ясно и просто\n")
    (tmp_path / "a.txt").write_bytes(text.encode(encoding) * 50)
    with pytest.raises(
        DataError, match=r"is not UTF-8 text .*Convert it from its encoding, which is LATIN1 in this"
    ):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json", "a.jsonl", "a"])
@pytest.mark.parametrize(
    "contents",
    [b"text\0text\n" * 50, b"text\0", b"\0" * 5000, b"one\0two\0" * 9,
     b"text\n" + b"\0" * 4096, "größer\0".encode("latin-1") * 20],
)  # fmt: skip
def test_what_has_nuls_is_no_text_and_no_encoding(contents: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(contents)
    assert "has NUL bytes: it is no text" in refusal(tmp_path / name)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_text_in_any_way(seed: int, tmp_path: Path) -> None:
    """As of an encrypted or compressed file that nothing is known of; also where its NULs were taken out."""
    raw = random.Random(seed).randbytes(3_000)
    wide = b"\xff\xfe" + raw
    for number, contents in enumerate(
        (raw, wide, raw.replace(b"\0", b""), raw.replace(b"\0", b"").decode("latin-1").encode())
    ):
        (tmp_path / f"{number}.txt").write_bytes(contents)
        assert "no" in refusal(tmp_path / f"{number}.txt")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_a_page_in_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n<!DOCTYPE html>\n<html><body>404</body></html>\n")
    assert "is a web page (HTML)" in refusal(tmp_path / name)


def test_the_page_names_each_kind() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    assert [kind.name for kind in KINDS if kind.name not in " ".join(page.split())] == []
