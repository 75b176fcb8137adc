"""Runs on a scheduler's dashboard, which has preloaded `jobrunner.dashboard`."""

import gc
import urllib.request

import dask
import pytest
from distributed import Client, LocalCluster
from msgspec import to_builtins

from jobrunner import Job, JobRunner, Node, Session, Task, current_task, epoch_limiter
from jobrunner.dashboard.runs_page import MOST_METRICS, told_runs
from jobrunner.story import RUNS, RunState, ToldRun
from jobrunner.story.places import Dashboard, has_dashboard
from tests.processes import await_true


@pytest.fixture
def cluster():
    options = {"processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        dask.config.set({"distributed.scheduler.preload": ["jobrunner.dashboard"]}),
        LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
    ):
        yield cluster


def report_loss():
    current_task().report(loss=0.5)


def make_job(name="walk"):
    with Job(name) as job:
        Task(report_loss, node=Node("n0"))
    epoch_limiter(job, 3)
    return job


def known_of(cluster):
    runs = cluster.scheduler.get_metadata([RUNS], default={})
    return [known for of_client in runs.values() for known in of_client.values()]


def test_the_last_run_of_each_job_is_told_until_its_client_is_gone(cluster):
    with Client(cluster, set_as_default=False) as client:
        with Session(client) as session:
            for name in ("walk", "talk", "walk"):
                JobRunner(make_job(name)).run(session)
        runs = list(told_runs(cluster.scheduler))
        found = [(it.run.job, it.run.phase, it.run.epoch, it.run.metrics) for it in runs]
        ended = ("finished", 3, {"loss": 0.5})
        assert found == [("walk", *ended), ("talk", *ended)]
    await_true(lambda: known_of(cluster) == [], "the client to be forgotten")


FORGED = [
    {"job": 3},
    {"epoch": 2**64},
    {"epoch_seconds": float("inf")},
    {"losses": "\ud800"},
    {"metrics": {"loss": [1]}},
    {"saved": {"epoch": 1}},
]


def test_what_a_client_makes_up_is_left_out(cluster):
    honest = to_builtins(ToldRun(1.0, RunState().now()))
    run = honest["run"]
    many = {**honest, "run": {**run, "metrics": {f"m{i}": i for i in range(5000)}}}
    forged = [{**honest, "run": {**run, **change}} for change in FORGED]
    forged += [{**honest, "time": "now"}, run, "text", None]
    said = {str(number): told for number, told in enumerate(forged)}
    for runs, count in (
        ({"c": {**said, "honest": honest, "many": many}, "d": [1]}, 2),
        ("text", 0),
        ([said], 0),
    ):
        cluster.scheduler.set_metadata([RUNS], runs)
        found = list(told_runs(cluster.scheduler))
        assert len(found) == count
        assert all(len(told.run.metrics) <= MOST_METRICS for told in found)
    cluster.scheduler.set_metadata([RUNS], {})


def test_metrics_that_dask_cannot_send_are_left_out(cluster):
    with Client(cluster, set_as_default=False) as client:
        view, state = Dashboard(client), RunState()
        state.on_epoch(1, 0.1, {"loss": 0.5, "big": 2**64, "\ud800": 1})
        view.draw(state.now())
        [told] = told_runs(cluster.scheduler)
        assert told.run.metrics == {"loss": 0.5, r"\ud800": 1}


def test_the_pages_are_those_of_dask_and_of_its_extension(cluster):
    pytest.importorskip("bokeh")
    link = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"

    def get(path):
        with urllib.request.urlopen(f"{link}/{path}", timeout=20) as answer:
            return str(answer.read().decode())

    assert "/individual-jobrunner" in get("individual-plots.json")
    assert "<title>jobrunner</title>" in get("individual-jobrunner")
    assert "navbar" in get("jobrunner")  # Dask's own


def test_no_question_is_left_over_if_the_client_is_closed_or_the_scheduler_has_no_page(
    inproc_client, recwarn
):
    assert not has_dashboard(inproc_client)
    inproc_client.close()
    assert not has_dashboard(inproc_client)
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]
