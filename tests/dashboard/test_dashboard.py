"""Runs on a scheduler's dashboard, which has preloaded `jobrunner.dashboard`."""

import gc
import urllib.request
from collections.abc import Iterator
from typing import Any

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
def cluster() -> Iterator[LocalCluster]:
    with (
        dask.config.set({"distributed.scheduler.preload": ["jobrunner.dashboard"]}),
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
    ):
        yield cluster


def report_loss() -> None:
    current_task().report(loss=0.5)


def make_job(name: str = "walk") -> Job:
    with Job(name) as job:
        Task(report_loss, node=Node("n0"))
    epoch_limiter(job, 3)
    return job


def known_of(cluster: LocalCluster) -> list[object]:
    runs = cluster.scheduler.get_metadata([RUNS], default={})
    return [known for of_client in runs.values() for known in of_client.values()]


def test_the_last_run_of_each_job_is_told_until_its_client_is_gone(cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        with Session(client) as session:
            for name in ("walk", "talk", "walk"):
                JobRunner(make_job(name)).run(session)
        runs = list(told_runs(cluster.scheduler))  # type: ignore[arg-type]
        found = [(it.run.job, it.run.phase, it.run.epoch, it.run.metrics) for it in runs]
        ended = ("finished", 3, {"loss": 0.5})
        assert found == [("walk", *ended), ("talk", *ended)]
    await_true(lambda: known_of(cluster) == [], "the client to be forgotten")


FORGED: list[dict[str, Any]] = [
    {"job": 3},
    {"epoch": 2**64},
    {"epoch_seconds": float("inf")},
    {"losses": "\ud800"},
    {"metrics": {"loss": [1]}},
    {"metrics": [1]},
    {"nodes": ["n0"]},
    {"saved": {"epoch": 1}},
    {"saving": 1},
    {"under_way": {"group": "epoch"}},
]


def test_what_a_client_makes_up_is_left_out(cluster: LocalCluster) -> None:
    honest: Any = to_builtins(ToldRun(1.0, RunState().now()))
    run = honest["run"]
    many = {**honest, "run": {**run, "metrics": {f"m{i}": i for i in range(5000)}}}
    forged = [{**honest, "run": {**run, **it}} for it in FORGED]
    forged += [{**honest, "time": "now"}, run]
    said = {str(i): it for i, it in enumerate([*forged, "text", 1, [], None])}
    scheduler = cluster.scheduler
    for runs in ({"c": {**said, "r": honest, "many": many}, "d": [1]}, {}, "text", [said]):
        scheduler.set_metadata([RUNS], runs)
        found = list(told_runs(scheduler))
        assert len(found) == (2 if runs and isinstance(runs, dict) else 0)
        assert all(len(told.run.metrics) <= MOST_METRICS for told in found)
    scheduler.set_metadata([RUNS], {})


def test_metrics_that_dask_cannot_send_are_left_out(cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        view, state = Dashboard(client), RunState()
        state.on_epoch(1, 0.1, {"loss": 0.5, "big": 2**64, "\ud800": 1})
        view.draw(state.now())
        [told] = told_runs(cluster.scheduler)  # type: ignore[arg-type]
        assert told.run.metrics == {"loss": 0.5, r"\ud800": 1}


def test_other_schedulers_are_told_nothing(inproc_client: Client) -> None:
    with Session(inproc_client) as session:
        JobRunner(make_job()).run(session)
        assert inproc_client.get_metadata(RUNS, default=None) is None


def test_the_pages_are_those_of_dask_and_of_its_extension(cluster: LocalCluster) -> None:
    pytest.importorskip("bokeh")
    link = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"

    def get(path: str) -> str:
        with urllib.request.urlopen(f"{link}/{path}", timeout=20) as answer:
            return str(answer.read().decode())

    assert "/individual-jobrunner" in get("individual-plots.json")
    assert "<title>jobrunner</title>" in get("individual-jobrunner")
    assert "navbar" in get("jobrunner")  # Dask's own


def test_no_question_is_left_over_if_the_client_is_closed(recwarn: pytest.WarningsRecorder) -> None:
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster:
        client = Client(cluster)
        client.close()
        assert not has_dashboard(client)
    gc.collect()
    assert not [it for it in recwarn if "never awaited" in str(it.message)]
