"""Workers that run several epochs per message all end after the same one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner.worker.epoch_batch import (
    AHEAD_SECONDS,
    LEAST_AHEAD_RUNS,
    MOST_AHEAD_RUNS,
    WINDOW_RUNS,
    EpochBatch,
    Grant,
    Progress,
)
from jobrunner.worker.messages import RunOrder
from tests.sampling import examples


def run(batch, stopped=()):
    return batch.end_run(list(stopped), "")


def test_after_the_time_limit_the_granted_epochs_still_run():
    now = [0.0]
    batch = EpochBatch(1, RunOrder(epochs=1000, seconds=1), clock=lambda: now[0])
    batch.extend()
    now[0] = 2.0
    while batch.action() == "run":
        run(batch)
        batch.extend()
    assert batch.action() == "end"
    assert len(batch.ended) == 1 + LEAST_AHEAD_RUNS
    assert sum(ended["seconds"] for ended in batch.ended) == 2.0


def test_a_late_grant_takes_nothing_back():
    batch = EpochBatch(1, RunOrder(epochs=100), None)
    batch.hear(Grant(5, False))
    batch.hear(Grant(1, False))
    run(batch)
    assert batch.action() == "run"


def test_a_late_report_counts_for_nothing():
    def runs_after(reports):
        batch = EpochBatch(1, RunOrder(epochs=1000, seconds=60), ["b"], clock=lambda: 0.0)
        for runs in reports:
            batch.hear(Progress("b", runs))
        while batch.action() == "run":
            run(batch)
            batch.extend()
        return len(batch.ended)

    assert runs_after([48, 16]) == runs_after([48]) > runs_after([16])


def test_epochs_and_steps_count_up_from_the_first():
    batch = EpochBatch(5, RunOrder(epoch=10, epochs=3, steps_per_epoch=2))
    moments = []
    for _ in range(5):
        moments.append(batch.position)
        run(batch)
    assert moments == [(10, 0), (10, 1), (11, 0), (11, 1), (12, 0)]
    assert EpochBatch(5, RunOrder()).position == (None, 0)
    assert batch.covers(5)
    assert batch.covers(10)
    assert not batch.covers(11)


@settings(max_examples=examples(25))
@given(
    epochs=st.integers(1, 60),
    steps=st.integers(1, 20),
    stops_at=st.none() | st.integers(1, 60),
    is_judged=st.booleans(),
    run_seconds=st.sampled_from([0.0, AHEAD_SECONDS / 16.5, AHEAD_SECONDS]),
    data=st.data(),
)
def test_all_workers_end_after_the_same_epoch_and_none_runs_far_ahead(
    epochs, steps, stops_at, is_judged, run_seconds, data
):
    names = ["a", "b", "c"]
    now = [0.0]
    order = RunOrder(epochs=epochs, steps_per_epoch=steps, is_judged=is_judged, seconds=1e9)
    batches = {
        name: EpochBatch(1, order, names[1:] if name == "a" else None, clock=lambda: now[0])
        for name in names
    }
    mail: dict[str, list] = {name: [] for name in names}

    def go_on(name):
        grant = batches[name].extend()
        if grant is not None:
            for follower in names[1:]:
                mail[follower].append(grant)

    def can_move(name):
        return mail[name] or batches[name].action() == "run"

    go_on("a")
    while movable := [name for name in names if can_move(name)]:
        name = data.draw(st.sampled_from(movable))
        batch = batches[name]
        if mail[name] and (batch.action() != "run" or data.draw(st.booleans())):
            batch.hear(mail[name].pop(0))
            go_on(name)
            continue
        done = len(batch.ended) + 1
        now[0] += run_seconds
        fires = is_judged and stops_at is not None and done >= stops_at * steps
        report = run(batch, ["stop"] if fires and name == "a" else [])
        if report is not None:
            mail["a"].append(Progress(name, report))
        go_on(name)
        ahead = max(len(s.ended) for s in batches.values())
        behind = min(len(s.ended) for s in batches.values())
        assert ahead - behind <= WINDOW_RUNS + steps + MOST_AHEAD_RUNS
    assert {batch.action() for batch in batches.values()} == {"end"}
    last = min(epochs, stops_at) if is_judged and stops_at is not None else epochs
    assert {len(batch.ended) for batch in batches.values()} == {last * steps}
