"""When a move to workers that have joined is worthwhile."""

import math

from jobrunner.run.decisions import MOST_EPOCHS, is_move_worthwhile

THREADS = {"w1": 1, "w2": 1, "w3": 2}


def pays(now, after, **facts):
    facts = {"epoch_seconds": 1.0, "epochs_left": 100, "save_seconds": 0.01, **facts}
    placements = ({f"n{i}": worker for i, worker in enumerate(it.split())} for it in (now, after))
    return is_move_worthwhile(*placements, THREADS, **facts)


def test_a_worker_that_halves_the_fullest_one_is_worth_a_move():
    assert pays("w1 w1", "w1 w2")
    assert pays("w1 w1", "w3 w3")
    assert not pays("w1 w2", "w2 w1")
    assert not pays("w1 " * 11, "w1 " * 10 + "w2", epoch_seconds=1000.0)  # a tenth is the least
    assert not pays("w1 w1 w2 w2", "w1 w1 w2 w3")  # the fullest has as much as before


def test_a_move_must_pay_for_itself_in_the_epochs_that_are_left():
    assert not pays("w1 w1", "w1 w2", epochs_left=0)
    assert not pays("w1 w1", "w1 w2", epochs_left=10, epoch_seconds=0.01)
    assert pays("w1 w1", "w1 w2", epochs_left=None, epoch_seconds=0.01)
    assert not pays("w1 w1", "w1 w2", save_seconds=MOST_EPOCHS, epochs_left=10_000_000)
    assert pays("w1 w1", "w1 w2", epoch_seconds=math.inf)
