"""The page on Dask's dashboard in a browser: it is live, and shows a loss."""

import re
import time

import dask
import pytest
from distributed import Client, LocalCluster

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task
from jobrunner.cluster import run_in_thread
from tests.browser.conftest import check_accessible, check_width

pytestmark = pytest.mark.browser


def fail_once(flag):
    """Raise in the third epoch, and end when asked to."""
    time.sleep(0.05)  # an epoch that can be seen
    lines = flag.read_text()
    flag.write_text(f"{lines}.")
    if len(lines) == 2:
        raise OSError("once")
    return flag.with_suffix(".end").exists()


@pytest.fixture
def cluster():
    pytest.importorskip("bokeh")
    with (
        dask.config.set({"distributed.scheduler.preload": ["jobrunner.dashboard"]}),
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
    ):
        yield cluster


def test_the_page_shows_runs_as_they_go_on(cluster, open_page, tmp_path):
    expect = pytest.importorskip("playwright.sync_api").expect
    page = open_page(f"http://127.0.0.1:{cluster.scheduler.http_server.port}/individual-jobrunner")
    page.get_by_text("No job runs on this cluster now.").wait_for()
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    text = page.locator("h1").evaluate("it => getComputedStyle(it).color")
    assert text == ("rgb(255, 255, 255)" if is_dark else "rgb(0, 0, 0)")
    below = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert below == ("rgb(18, 18, 18)" if is_dark else "rgb(255, 255, 255)")  # a frame has its own
    assert page.locator("meta[name=viewport]").count() == 1  # else phones take it for a wide page
    flag = tmp_path / "flag"
    flag.write_text("")
    with Job("<b>walk") as job, Node("n0"):
        ends = Task(fail_once, kwargs={"flag": flag}, transient_errors=OSError)
        job.add_stop_condition(ends)
    runner = JobRunner(job, MultiNodeCheckpointManager(tmp_path / "runs"))
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        running = run_in_thread(lambda: runner.run(session), "run")
        page.get_by_text("1 loss", exact=True).wait_for()
        page.get_by_text("<b>walk", exact=True).wait_for()
        epoch = page.get_by_text(re.compile(r"^epoch \d+$"))
        expect(epoch).not_to_have_text(epoch.inner_text())
        check_width(page)
        check_accessible(page)
        flag.with_suffix(".end").touch()
        running.result(30)
        page.get_by_text("has finished").wait_for()
    page.get_by_text("No job runs on this cluster now.").wait_for()
