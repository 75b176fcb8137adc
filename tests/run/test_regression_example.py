"""A regression on a persisted Dask array has the same bits whatever happens to its workers and driver."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from distributed import Client, LocalCluster

from jobrunner import JobRunner, MultiNodeCheckpointManager, Session

EXAMPLE = Path(__file__).parents[2] / "examples" / "regression.py"
EPOCHS, ROWS = 12, 2_000


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("example_regression", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[module.__name__]


class Upheavals:
    """Calls functions after epochs, once each."""

    def __init__(self, **calls):
        self.calls = {int(name.removeprefix("after_")): call for name, call in calls.items()}
        self.workers = []

    def on_epoch(self, epoch, seconds, metrics):
        if epoch in self.calls:
            self.calls.pop(epoch)()

    def on_placement(self, placement):
        self.workers.append({*placement.values()})


def weights(path):
    return MultiNodeCheckpointManager(path).open(EPOCHS)["server"].load("w").tobytes()


def test_workers_join_leave_and_die_and_the_bits_stay(example, inproc_session, tmp_path):
    x, y = example.make_data(ROWS, 5, blocks=6)
    job = example.build_from(*inproc_session.client.persist([x, y]), EPOCHS)
    JobRunner(job, MultiNodeCheckpointManager(tmp_path / "whole")).run(inproc_session)
    spread = inproc_session.client.compute(example.residuals(inproc_session, 6).std()).result()
    assert spread == pytest.approx(0.1, rel=0.1)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(**options) as cluster,
        Client(cluster, set_as_default=False) as client,
        Session(client) as session,
    ):
        first, second = client.scheduler_info()["workers"]
        deaths = []

        def kill_second():
            deaths.append(client.submit(os._exit, 1, workers=[second], retries=0))

        upheavals = Upheavals(
            after_2=lambda: client.retire_workers([first]),
            after_4=lambda: cluster.scale(3),
            after_7=kill_second,
        )
        job = example.build_from(*client.persist([x, y]), EPOCHS)
        manager = MultiNodeCheckpointManager(tmp_path / "parts")
        result = JobRunner(job, manager, callbacks=[upheavals]).run(session)
    assert (result.epoch, result.restarts) == (EPOCHS, 1)
    assert upheavals.workers[0] == {first, second}
    assert first not in upheavals.workers[1]
    assert second not in upheavals.workers[-1]
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("example_regression", sys.argv[1])
example = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = example
spec.loader.exec_module(example)
import os, time
from jobrunner import JobRunner, MultiNodeCheckpointManager, Session

class Slow:
    def on_epoch(self, epoch, seconds, metrics):
        time.sleep(0.1)

with Session.local(workers=2, processes=False) as session:
    x, y = session.client.persist([*example.make_data({rows}, 5, 6)])
    job = example.build_from(x, y, {epochs})
    JobRunner(job, MultiNodeCheckpointManager(sys.argv[2]), callbacks=[Slow()]).run(session)
"""


def test_a_killed_driver_resumes_with_the_same_bits(example, inproc_session, tmp_path):
    x, y = example.make_data(ROWS, 5, blocks=6)
    job = example.build_from(x, y, EPOCHS)
    JobRunner(job, MultiNodeCheckpointManager(tmp_path / "whole")).run(inproc_session)
    command = [sys.executable, "-c", DRIVER.format(rows=ROWS, epochs=EPOCHS)]
    manager = MultiNodeCheckpointManager(tmp_path / "killed")
    with subprocess.Popen([*command, str(EXAMPLE), str(tmp_path / "killed")]) as driver:
        while (manager.latest() or 0) < 3:
            assert driver.poll() is None
        driver.kill()
    reached = manager.latest()
    assert reached < EPOCHS
    result = JobRunner(job, manager).run(inproc_session)
    assert result.resumed_from == reached
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
