"""Runs on a scheduler's dashboard, which has preloaded `jobrunner.dashboard`."""

import urllib.request
from collections.abc import Iterator

import dask
import pytest
from dask.utils import key_split
from distributed import Client, LocalCluster
from prometheus_client import REGISTRY, generate_latest

from jobrunner import Job, JobRunner, Node, Session, Task, current_task, epoch_limiter
from jobrunner.view import RUNS, RunState, draw_html
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


def test_a_run_is_told_until_its_session_closes(cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        with Session(client) as session:
            JobRunner(make_job()).run(session)
            await_true(lambda: [it["phase"] for it in known_of(cluster)] == ["finished"], "the end")
            (known,) = known_of(cluster)
            assert (known["job"], known["epoch"], known["metrics"]) == ("walk", 3, {"loss": 0.5})
            said = generate_latest(REGISTRY).decode()
            assert 'jobrunner_epoch{job="walk"' in said
            assert 'name="loss"' in said
        await_true(lambda: known_of(cluster) == [None], "the session to be forgotten")
        assert 'job="walk"' not in generate_latest(REGISTRY).decode()
    await_true(lambda: known_of(cluster) == [], "the client to be forgotten")


def test_a_client_that_dies_is_forgotten(cluster: LocalCluster) -> None:
    client = Client(cluster, set_as_default=False)
    JobRunner(make_job()).run(Session(client))
    await_true(lambda: known_of(cluster), "the run")
    client.close()  # and not its session
    await_true(lambda: known_of(cluster) == [], "the client to be forgotten")


def test_other_schedulers_are_told_nothing(inproc_client: Client) -> None:
    with Session(inproc_client) as session:
        JobRunner(make_job()).run(session)
        assert inproc_client.get_metadata(RUNS, default=None) is None


def test_dasks_pages_name_job_and_nodes(inproc_client: Client) -> None:
    with Session(inproc_client) as session:
        JobRunner(make_job("k|means")).run(session)
        tasks = inproc_client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
        assert [key_split(key) for key in tasks] == ["k/means: n0-jobrunner"]


def test_names_are_shown_as_text() -> None:
    state = RunState()
    known = {**state.to_dict(), "job": "<script>", "metrics": {"<img src=x>": 1.0}}
    known["nodes"] = [
        {"node": "<i>", "worker": "<b>\x1b", "does": "runs", "task": "<u>", "ended": 0, "tasks": 1}
        | {"saved_bytes": None}
    ]
    drawn = draw_html(known)
    assert not any(mark in drawn for mark in ("<script", "<img", "<i>", "<b>", "<u>", "\x1b"))
    assert "&lt;script&gt;" in drawn


def test_the_pages_are_those_of_dask_and_of_its_extension(cluster: LocalCluster) -> None:
    pytest.importorskip("bokeh")
    link = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"

    def get(path: str) -> str:
        with urllib.request.urlopen(f"{link}/{path}", timeout=20) as answer:
            return str(answer.read().decode())

    assert "/individual-jobrunner" in get("individual-plots.json")
    assert "<title>jobrunner</title>" in get("individual-jobrunner")
    assert "navbar" in get("jobrunner")  # Dask's own
    assert "jobrunner_epoch" in get("metrics")
