"""The window of microbatches in flight: what hides an answer's way, and no more."""

from __future__ import annotations

from collections import deque

from node.pipeline.gate import MEASURED, Window


def test_the_window_hides_the_shortest_answer_with_something_to_spare() -> None:
    window = Window(batch=64, most=64)
    assert window.in_flight(0.3, 0.1) == 12
    assert window.in_flight(0.9, 0.1) == 12, "a queue on the way is not hidden by a longer one"


def test_the_window_stays_within_the_memory_and_never_closes() -> None:
    window = Window(batch=64, most=5)
    assert window.in_flight(10.0, 0.1) == 5
    assert window.in_flight(0.0, 10.0) == 3
    assert Window(batch=1, most=1).in_flight(10.0, 0.1) == 1


def test_a_longer_way_is_noticed_after_a_batch() -> None:
    window = Window(batch=4, most=64)
    window.in_flight(0.1, 0.1)
    sizes = [window.in_flight(0.5, 0.1) for _ in range(MEASURED)]
    assert (sizes[0], sizes[-1]) == (6, 18)


def test_it_keeps_two_stages_busy_and_does_not_grow_with_its_own_queue() -> None:
    """Two devices, each one second a microbatch, three seconds there and back: a closed queueing network."""
    window, batch = Window(batch=40, most=40), 40
    for _ in range(3):
        sent: deque[float] = deque()
        in_flight, now, far_free, done = 40, 0.0, 0.0, 0
        launched, answers = 0, deque[float]()
        while done < batch:
            if answers and answers[0] <= now:  # backward goes first
                answers.popleft()
                in_flight = window.in_flight(now - sent.popleft(), 1.0)
                now, done = now + 0.5, done + 1
            elif launched < batch and launched - done < in_flight:
                now, launched = now + 0.5, launched + 1
                sent.append(now)
                far_free = max(far_free, now + 1.5) + 1.0
                answers.append(far_free + 1.5)
            else:
                now = answers[0]
        ended = now
    assert in_flight <= 15, "three times what hides four seconds"
    assert ended <= batch * 1.0 + 4.5, "no time is lost but the first answer's and the last backward pass"
