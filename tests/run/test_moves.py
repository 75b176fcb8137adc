"""When a move to workers that have joined is worthwhile."""

import math

import pytest

from jobrunner.run.moves import MOST_EPOCHS, Moves

THREADS = {"w1": 1, "w2": 1, "w3": 2}


def is_worthwhile(now, after, moves=None, **facts):
    facts = {"epoch_seconds": 1.0, "epochs_left": 100, "save_seconds": 0.01, **facts}
    placements = ({f"n{i}": worker for i, worker in enumerate(it.split())} for it in (now, after))
    return (moves or Moves()).is_worthwhile(*placements, THREADS, **facts)


def test_a_worker_that_halves_the_fullest_one_is_worth_a_move():
    assert is_worthwhile("w1 w1", "w1 w2")
    assert is_worthwhile("w1 w1", "w3 w3")
    assert not is_worthwhile("w1 w2", "w2 w1")
    assert not is_worthwhile("w1 w1 w2 w2", "w1 w1 w2 w3")  # the fullest has as much as before


def test_a_move_must_pay_for_itself_in_the_epochs_that_are_left():
    assert not is_worthwhile("w1 w1", "w1 w2", epochs_left=0)
    assert not is_worthwhile("w1 w1", "w1 w2", epochs_left=10, epoch_seconds=0.01)
    assert is_worthwhile("w1 w1", "w1 w2", epochs_left=None, epoch_seconds=0.01)
    assert not is_worthwhile("w1 w1", "w1 w2", save_seconds=MOST_EPOCHS, epochs_left=10_000_000)
    assert is_worthwhile("w1 w1", "w1 w2", epoch_seconds=math.inf)


def test_a_measured_move_replaces_the_guess():
    moves = Moves()
    assert is_worthwhile("w1 w1", "w1 w2", moves, epochs_left=10)
    moves.note_move(3.0)
    assert not is_worthwhile("w1 w1", "w1 w2", moves, epochs_left=10)


@pytest.mark.parametrize(("seconds", "promise"), [(0.01, False), (0.5, True)])
def test_what_nodes_do_is_measured(seconds, promise):
    """n0 takes a second; n1 moves away, and takes less or as much."""
    moves = Moves()
    moves.note_spans([("n0", "train", 0.0, 1.0), ("n1", "log", 0.0, seconds)])
    assert is_worthwhile("w1 w1", "w1 w2", moves) == promise
