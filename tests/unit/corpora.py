"""The same documents as text files, JSON lines, parquet and dataset directories."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

WORDS = ["the", "a", "cat", "größer", "sat", "ran", "中文", "on", "mat", "🙂", "and", "def", "return"]


def made_up(count: int, seed: int = 0, words: tuple[int, int] = (5, 120)) -> list[str]:
    """Documents that differ, each with its number in it."""
    rng = random.Random(seed)
    return [
        f"document {number}\n" + " ".join(rng.choices(WORDS, k=rng.randint(*words))) + "\n"
        for number in range(count)
    ]


def as_text(directory: Path, documents: Sequence[str]) -> str:
    directory.mkdir()
    for number, document in enumerate(documents):
        (directory / f"{number:05}.txt").write_text(document, encoding="utf-8", newline="")
    return str(directory / "*.txt")


def as_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> str:
    lines = "".join(json.dumps({"id": n, field: document}) + "\n" for n, document in enumerate(documents))
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return str(path)


def zstd(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


def as_parquet(path: Path, documents: Sequence[str], field: str = "text") -> str:
    table = pyarrow.table({"id": list(range(len(documents))), field: list(documents)})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return str(path)


def as_hub_layout(directory: Path, documents: Sequence[str]) -> str:
    """Two shards of the split "train" and one of "test", as repositories of the Hub have them."""
    (directory / "data").mkdir(parents=True)
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# A dataset\n")
    half = len(documents) // 2
    as_parquet(directory / "data" / "train-00000-of-00002.parquet", documents[:half])
    as_parquet(directory / "data" / "train-00001-of-00002.parquet", documents[half:])
    as_parquet(directory / "data" / "test-00000-of-00001.parquet", ["not to be trained on"])
    return str(directory)


def as_saved_to_disk(directory: Path, documents: Sequence[str]) -> str:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": list(documents)}).save_to_disk(str(directory))
    return str(directory)
