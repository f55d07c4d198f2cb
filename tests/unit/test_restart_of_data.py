"""A node that is stopped anywhere goes on with the very sequences that it would have seen, whatever its data are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.data.opening import DataPlan, open_data
from node.storage.position import Position
from tests.swarm.micro import micro_manifest
from tests.unit import corpora

DOCUMENTS = corpora.made_up(10)
DRAWN, AFTER = 150, 12  # microbatches: over two epochs; and those compared after each restart
WINDOWS = (1, 64, 333, 2_000, 2**23)  # tokens: a sequence alone, some, many, more than an epoch has

Drawn = list[tuple[object, Position]]


def stream(folder: Path, documents: Sequence[str]) -> str:
    return f"hub:{corpora.as_hub_layout(folder, documents)}"


KINDS: dict[str, Callable[[Path], str]] = {
    "text": lambda folder: corpora.as_text(folder / "texts", DOCUMENTS),
    "json-lines": lambda folder: corpora.as_jsonl(folder / "lines.jsonl.gz", DOCUMENTS),
    "parquet": lambda folder: corpora.as_parquet(folder / "rows.parquet", DOCUMENTS),
    "saved-to-disk": lambda folder: corpora.as_saved_to_disk(folder / "saved", DOCUMENTS),
    "stream": lambda folder: stream(folder / "dataset", DOCUMENTS),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind == "stream" else kind for kind in KINDS]
)
def test_a_restart_anywhere_goes_on_with_the_same_sequences(kind: str, tmp_path: Path) -> None:
    place = DataPlan((KINDS[kind](tmp_path),), "text", tmp_path / "cache")
    known: dict[int, Drawn] = {}

    def drawn(window: int, position: Position | None, count: int) -> Drawn:
        manifest = micro_manifest(data__source="local", data__shuffle_window=window)
        data = open_data(manifest, place, None)
        line = data.batches("run", "peer", manifest, position or Position(data.identity))
        return [(inputs.tolist(), after) for (inputs, _), after in islice(line, count)]

    @settings(
        max_examples=3 if kind == "stream" else 15,
        suppress_health_check=[HealthCheck.too_slow],
        deadline=None,
    )
    @given(window=st.sampled_from(WINDOWS), stop=st.integers(1, DRAWN - AFTER))
    def restarts(window: int, stop: int) -> None:
        whole = known.setdefault(window, drawn(window, None, DRAWN))
        assert whole[-1][1].epoch >= 2
        assert drawn(window, whole[stop - 1][1], AFTER) == whole[stop : stop + AFTER]

    restarts()


def test_a_position_of_another_window_is_taken_to_the_one_that_it_lies_in(tmp_path: Path) -> None:
    """As of a checkpoint from before windows had their present size."""
    place = DataPlan((KINDS["text"](tmp_path),), "text", tmp_path / "cache")
    before, now = (
        micro_manifest(data__source="local", data__shuffle_window=window) for window in (333, 2_000)
    )
    data = open_data(before, place, None)
    kept = [after for _, after in islice(data.batches("run", "peer", before, Position(data.identity)), 60)][
        -1
    ]
    [(_, after)] = islice(data.batches("run", "peer", now, kept), 1)
    assert (after.epoch, after.document, after.token) == (kept.epoch, kept.document, kept.token)
    assert after.drawn == kept.drawn + now.inner.sequences
