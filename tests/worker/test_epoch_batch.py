"""Workers that run several epochs on their own end after the same one, whatever comes late."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.worker.epoch_batch import (
    AHEAD_SECONDS,
    LEAST_AHEAD_RUNS,
    MOST_AHEAD_RUNS,
    REPORT_RUNS,
    WINDOW_RUNS,
    Grant,
    Stint,
)


def run(stint, stopped=()):
    stint.end_run(list(stopped), "")


def test_one_epoch_ends_by_itself():
    stint = Stint(7, steps_per_epoch=2)
    assert [stint.action(), stint.run_number] == ["run", 7]
    run(stint)
    assert [stint.action(), stint.run_number] == ["run", 8]
    run(stint)
    assert stint.extend() is None
    assert stint.action() == "end"


def test_a_true_condition_is_the_end_and_the_followers_are_told():
    stint = Stint(1, epochs=10, followers=["b"], is_judged=True, seconds=60)
    run(stint)
    assert stint.extend() == Grant(2, False)
    run(stint, ["a/stop"])
    assert stint.extend() == Grant(2, True)
    assert stint.action() == "end"


def test_time_is_up_after_the_epoch_that_is_granted():
    now = [0.0]
    stint = Stint(1, epochs=1000, seconds=1, clock=lambda: now[0])
    stint.extend()
    now[0] = 2.0
    while stint.action() == "run":
        run(stint)
        stint.extend()
    assert stint.action() == "end"
    assert len(stint.ended) == 1 + LEAST_AHEAD_RUNS
    assert sum(ended.seconds for ended in stint.ended) == 2.0


@pytest.mark.parametrize(
    ("run_seconds", "most"),
    [
        (0.0, MOST_AHEAD_RUNS),
        (AHEAD_SECONDS / 1000, MOST_AHEAD_RUNS),
        (AHEAD_SECONDS / 16.5, 16),
        (AHEAD_SECONDS, LEAST_AHEAD_RUNS),
    ],
)
def test_short_runs_are_granted_further_ahead_and_long_ones_not_for_long(run_seconds, most):
    now = [0.0]
    stint = Stint(1, epochs=1000, seconds=60, clock=lambda: now[0])
    grants = [stint.extend()]
    while len(stint.ended) < 200:
        now[0] += run_seconds
        run(stint)
        grants.append(stint.extend())
    granted = [grant.runs for grant in grants if grant is not None]
    assert {b - a for a, b in itertools.pairwise(granted[1:])} == {most}


def test_a_follower_waits_for_its_lead_and_says_how_far_it_is():
    stint = Stint(1, epochs=100, lead="a")
    run(stint)
    assert stint.action() == "wait"
    stint.hear_grant(Grant(REPORT_RUNS, False))
    for _ in range(REPORT_RUNS - 1):
        assert stint.report() is None
        run(stint)
    assert stint.report() == REPORT_RUNS
    stint.hear_grant(Grant(REPORT_RUNS - 1, False))  # an old one
    stint.hear_grant(Grant(REPORT_RUNS, True))
    assert stint.action() == "end"


def test_epochs_and_steps_are_counted_on_from_the_first():
    stint = Stint(5, epochs=3, steps_per_epoch=2)
    moments = []
    for _ in range(5):
        moments.append(stint.moment(10, 0))
        run(stint)
    assert moments == [(10, 0), (10, 1), (11, 0), (11, 1), (12, 0)]
    assert stint.moment(None, 0) == (None, 0)
    assert stint.covers(5)
    assert stint.covers(10)
    assert not stint.covers(11)


@given(
    epochs=st.integers(1, 60),
    steps=st.integers(1, 20),
    stops_at=st.none() | st.integers(1, 60),
    is_judged=st.booleans(),
    run_seconds=st.sampled_from([0.0, AHEAD_SECONDS / 16.5, AHEAD_SECONDS]),
    data=st.data(),
)
def test_all_end_after_the_same_epoch_and_nobody_runs_far_ahead(
    epochs, steps, stops_at, is_judged, run_seconds, data
):
    names = ["a", "b", "c"]
    now = [0.0]
    stints = {
        name: Stint(
            1,
            epochs,
            steps,
            lead="" if name == "a" else "a",
            followers=names[1:] if name == "a" else (),
            is_judged=is_judged,
            seconds=1e9,
            clock=lambda: now[0],
        )
        for name in names
    }
    mail: dict[str, list] = {name: [] for name in names}

    def go_on(name):
        grant = stints[name].extend()
        if grant is not None:
            for follower in names[1:]:
                mail[follower].append(grant)

    def can_move(name):
        return mail[name] or stints[name].action() == "run"

    go_on("a")
    while movable := [name for name in names if can_move(name)]:
        name = data.draw(st.sampled_from(movable))
        stint = stints[name]
        if mail[name] and (stint.action() != "run" or data.draw(st.booleans())):
            note = mail[name].pop(0)
            if name == "a":
                stint.hear_report(*note)
                go_on("a")
            else:
                stint.hear_grant(note)
            continue
        done = len(stint.ended) + 1
        now[0] += run_seconds
        fires = is_judged and stops_at is not None and done >= stops_at * steps
        run(stint, ["stop"] if fires and name == "a" else [])
        if stint.report() is not None:
            mail["a"].append((name, stint.report()))
        go_on(name)
        ahead = max(len(s.ended) for s in stints.values())
        behind = min(len(s.ended) for s in stints.values())
        assert ahead - behind <= WINDOW_RUNS + steps + MOST_AHEAD_RUNS
    assert {stint.action() for stint in stints.values()} == {"end"}
    last = min(epochs, stops_at) if is_judged and stops_at is not None else epochs
    assert {len(stint.ended) for stint in stints.values()} == {last * steps}
