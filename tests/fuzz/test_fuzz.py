"""Every decoder and whole sessions, for a moment; `make fuzz` goes on for ten minutes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.answers import Answered, answers, takes
from tests.fuzz.decoders import CORPUS, DECODERS, corpus_of, survives
from tests.fuzz.mutations import damaged
from tests.fuzz.sessions import Step, play, sessions


def test_every_decoder_has_a_corpus_of_what_it_takes() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(DECODERS)
    for name in DECODERS:
        for raw in corpus_of(name):
            assert len(raw) < 20_000
            assert survives(name, raw)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_with_an_error_of_ours(name: str, data: st.DataObject) -> None:
    assert survives(name, data.draw(damaged(corpus_of(name))))


@settings(max_examples=25, deadline=None)
@given(session=sessions)
def test_a_session_with_damage_leaves_the_other_side_well(session: list[Step]) -> None:
    assert play(session) == []


@settings(max_examples=400, deadline=None)
@given(answered=answers())
def test_an_odd_answer_is_refused_or_does_no_harm(answered: Answered) -> None:
    takes(answered)
