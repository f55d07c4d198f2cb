"""Which files the data are, and what bytes are worth before any model: the entropies beside a swarm's loss."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch

from bootstrap.evaluation.measuring import MeasuredText
from bootstrap.local.measuring import entropies_of
from node.data.batches import TrainingData
from node.data.documents import DocumentOrder, Split, stored_documents
from node.data.opening import DataPlan, open_data
from node.data.sources import files_of, places_of, python_stdlib_files
from node.data.tokenizer import ByteTokenizer
from node.storage.position import Position
from protocol.errors import DataError, UserError
from protocol.run.manifest import load_preset
from tests.swarm.micro import MadeUpDocuments, micro_manifest

MANIFEST = micro_manifest(stages=1)
TINY = load_preset("tiny")


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    return open_data(TINY, DataPlan((), "text", tmp_path_factory.mktemp("cache")), None)


# --- files ---


def test_the_stdlib_corpus_is_the_librarys_own_source_in_order_of_path() -> None:
    files = python_stdlib_files()
    names = [path.as_posix() for path in files]
    assert names == sorted(names)
    assert Path(os.__file__) in files
    assert any("idlelib" in path.parts for path in files)
    for path in files:
        assert path.suffix == ".py"
        assert not {"test", "tests", "site-packages", "__pycache__"} & set(path.parts[-3:])


def test_a_run_without_data_of_its_volunteers_trains_on_the_librarys_source(stdlib: TrainingData) -> None:
    stdlib.require(128)
    inputs, labels = next(iter(stdlib.validation_batches(128, 512)))
    assert inputs.shape == labels.shape == (512, 128)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    text = bytes(token for row in inputs[:16].tolist() for token in row if token)
    sources = b"".join(path.read_bytes() for path in python_stdlib_files())
    assert text[:1000] in sources


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the published number is Python 3.11's")
def test_the_librarys_source_is_the_published_number_of_documents(stdlib: TrainingData) -> None:
    documents = stdlib.documents
    count = sum(1 for _ in documents.training((), 0, 0)) + sum(1 for _ in documents.held_out())
    assert count == pytest.approx(1_268, abs=15)  # builds and patch releases differ a little


def test_files_globs_and_lists_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name, text in (("b.txt", "bb"), ("a.txt", "aa"), ("deep/er/c.txt", "cc"), ("deep/empty.txt", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "[odd] name.txt").write_text("odd")

    def read(*source: str) -> str:
        return "".join(path.read_text() for path in places_of([str(tmp_path / entry) for entry in source]))

    assert read("b.txt") == "bb"
    assert read("b.txt", "a.txt") == "bbaa"
    assert read("[ab].txt") == "aabb"
    assert read("**/*.txt") == "oddaabbcc"
    assert read("b.txt", "*.txt", "b.txt") == "bboddaa"
    assert read("[odd] name.txt") == "odd"


def test_unusable_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    for name, message in (
        ("missing.txt", r"missing.txt' \(.*No such file.*Check"),
        ("nul\0.txt", r"nul.*\(.*Check"),
        ("x" * 300, r"xxx' \(.*too long.*Check"),
        ("empty.txt", "empty.txt is empty. Name"),
        ("folder", r"folder is a folder that has no files. Name files with text"),
        ("*.md", r"No file matches .*\*.md. Check"),
        ("loop.txt", r"loop.txt' \("),
    ):
        with pytest.raises(DataError, match=message):
            files_of(str(tmp_path / name))
    for look in (files_of, lambda entry: places_of([entry])):
        with pytest.raises(
            UserError, match=r"no user of this machine .* ~nobody-here/a\.txt\. Check the name"
        ):
            look("~nobody-here/a.txt")
    for entries in ([str(tmp_path / "e*.txt")], []):
        with pytest.raises(DataError, match="no text"):
            stored_documents(entries, "text", 16_384, Split(0.05), tmp_path / "cache")


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root reads everything; be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_named() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        path = Path(directory) / "secret.txt"
        path.write_text("text")
        path.chmod(0)
        with without_privileges(), pytest.raises(DataError) as refusal:
            stored_documents((str(path),), "text", 16_384, Split(0.05), Path(directory) / "cache")
        assert str(path) in str(refusal.value)
        assert "permissions" in str(refusal.value)


# --- who draws what ---


def test_what_is_drawn_depends_on_run_and_peer_and_on_nothing_else(stdlib: TrainingData) -> None:
    def drawn(run: str, peer: str) -> torch.Tensor:
        line = stdlib.batches(run, peer, TINY, Position(stdlib.identity))
        return torch.stack([inputs for (inputs, _), _ in islice(line, 3)])

    first = drawn("run", "peer")
    assert torch.equal(first, drawn("run", "peer"))
    for other in (("run2", "peer"), ("run", "peer2"), ("ru", "npeer")):
        assert not torch.equal(first, drawn(*other))


def test_an_order_is_the_same_in_every_release() -> None:
    """A peer that comes back with another version goes on where it was."""
    order = DocumentOrder(251, ("run", "peer", 0))
    assert [order[place] for place in range(6)] == [135, 191, 155, 250, 141, 72]


# --- entropies ---


def entropies(training: str, held_out: str) -> tuple[float, float]:
    """Of `held_out` under the frequencies of `training`."""

    class Given(MadeUpDocuments):
        def __init__(self) -> None:
            self._training, self._held_out = [training], [held_out]

    data = TrainingData(Given(), ByteTokenizer())
    text = MeasuredText(list(data.validation_batches(32, 8)), 0)
    return entropies_of(MANIFEST, data, text)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the published numbers are Python 3.11's")
def test_the_entropies_of_the_librarys_source_are_the_published_ones(stdlib: TrainingData) -> None:
    text = MeasuredText(list(stdlib.validation_batches(128, 64)), 0)
    unigram, bigram = entropies_of(TINY, stdlib, text)  # builds and patch releases differ a little
    assert unigram == pytest.approx(3.216, abs=0.03)
    assert bigram == pytest.approx(2.445, abs=0.03)


def test_entropies_of_text_whose_entropies_are_known() -> None:
    generator = torch.Generator().manual_seed(0)
    letters = "".join("abcd"[int(n)] for n in torch.randint(4, (2_000_000,), generator=generator))
    unigram, bigram = entropies(letters[:1_900_000], letters[1_900_000:])
    assert unigram == pytest.approx(math.log(4), abs=2e-3)
    assert bigram == pytest.approx(math.log(4), abs=2e-3)
    unigram, bigram = entropies("ab" * 1_000_000, "ab" * 1000)
    assert unigram == pytest.approx(math.log(2), abs=5e-3)
    assert bigram == pytest.approx(0, abs=6e-3)


def test_bytes_never_seen_in_training_cost_much_but_not_infinitely() -> None:
    assert all(5 < entropy < 25 for entropy in entropies("a" * 2_000_000, "b" * 100))
