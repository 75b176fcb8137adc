"""Hundreds of runs under simulated trouble; `simulation.py` runs thousands, or one by its number."""

from collections import Counter

import pytest

from jobrunner.run.decisions import Losses, next_decision
from tests.sampling import sampled
from tests.simulation.simulation import World


@sampled("seeds", sample=100, nightly=5000)
def test_no_fault_loses_an_epoch_or_changes_a_bit(seeds):
    totals = Counter()
    for seed in range(seeds):
        try:
            totals += World(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for what in ("moves", "losses", "losses to a cut", "taken over", "kill driver", "stop worker"):
        assert totals[what] > seeds // 15, f"the simulation hardly ever comes to {what}"


def test_a_seed_gives_the_same_run_again():
    assert World(7).run() == World(7).run()


@pytest.mark.parametrize(
    "mutation",
    [
        {"fresh_bindings": False},
        {"name": lambda claim, node, at: f"{node}.{at}"},
    ],
    ids=["claims share a name", "names of stores are claimed twice"],
)
def test_the_simulation_finds_omissions_in_the_protocol(mutation):
    failed = 0
    for seed in range(100):
        try:
            World(seed, **mutation).run()
        except Exception:
            failed += 1
        if failed == 2:
            return
    raise AssertionError("no more than one run of a hundred has failed")


def test_what_comes_after_an_epoch():
    assert next_decision() == "run an epoch"
    assert next_decision(stopped_by="a/met", stop_asked="SIGTERM") == "finish"
    assert next_decision(stop_asked="SIGTERM", is_leaving=True) == "stop"
    assert next_decision(is_leaving=True) == "run an epoch"  # moving would undo one
    assert next_decision(is_leaving=True, is_recorded=True) == "move"
    assert next_decision(has_room=True, is_recorded=True) == "move"


def test_losses_in_a_row_are_too_many_after_the_last_restart():
    losses = Losses(limit=2).after_loss().after_loss()
    assert not losses.are_too_many
    assert losses.after_loss().are_too_many
    assert losses.after_record() == Losses(limit=2, in_all=2)
