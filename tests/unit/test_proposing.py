"""A founder's answers become a run that their machines can train in the time that there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.checking.fitting import verdict
from bootstrap.creating.proposing import ENOUGH, HOME, Wishes, best, parameters_of, proposals
from node.machine.devices import DEVICES, processor_of

FRIENDS = Wishes("friends", "texts/*.txt", "own", True, 4, processor_of(8), 24.0)


def test_a_run_for_friends_has_what_they_said() -> None:
    for proposal in proposals(FRIENDS):
        manifest = proposal.manifest
        assert (manifest.name, manifest.data.source, manifest.access.private) == ("friends", "local", True)
        assert manifest.stages >= 2, "only those of the first stage need the text"
        assert manifest.stages * proposal.replicas <= FRIENDS.machines
        assert proposal.cost.hours <= 1.1 * FRIENDS.hours
        assert verdict(manifest, [FRIENDS.device], HOME, proposal.replicas).startswith(
            "Fits 4 machines of 8 GB, two"
        )


def test_the_largest_size_that_sees_enough_text_is_proposed() -> None:
    sizes = [
        parameters_of(best(proposals(replace(FRIENDS, hours=hours))).manifest) for hours in (1, 24, 1_000)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    chosen = best(proposals(FRIENDS))
    assert chosen.cost.tokens >= ENOUGH * parameters_of(chosen.manifest)


def test_a_small_model_is_not_trained_for_ever() -> None:
    smallest = proposals(replace(FRIENDS, hours=100_000.0))[0]
    assert smallest.cost.hours < 1_000


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "rows"), [("bytes", None, 256), ("t.json", 5_056, 5_056)]
)
def test_the_vocabulary_is_the_tokenizers(tokenizer: str, vocabulary: int | None, rows: int) -> None:
    found = proposals(replace(FRIENDS, tokenizer=tokenizer), vocabulary)
    assert {proposal.manifest.model.vocab_size for proposal in found} == {rows}


def test_larger_machines_get_larger_models_and_tiny_ones_none() -> None:
    names = [
        {proposal.preset for proposal in proposals(replace(FRIENDS, device=device))}
        for device in (processor_of(0.001), processor_of(8), DEVICES["h200"])
    ]
    assert names[0] == set()
    assert names[1] < names[2]
