"""A library that another thread has only begun to import disturbs no job that does not use it."""

import sys
from types import ModuleType

import numpy as np
import pytest

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Task

LIBRARIES = ["torch", "pandas", "scipy.sparse"]


class Counter:
    """An object that may be of any library, and is saved by its state."""

    n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_half_imported_library_ends_no_job(library, inproc_session, tmp_path, monkeypatch):
    def count(counter):
        counter.n += 1

    monkeypatch.setitem(sys.modules, library, ModuleType(library))  # as `import` begins
    with Job("j") as job:
        with job.init_group:
            made = Task(lambda: [np.zeros(3), {"k": (1, Counter())}], node="a").output()
            Task(Counter, outputs="counter", node="a")
            Task(lambda value: value[0], inputs=made, outputs="seen", node="b")
        Task(count, updates="counter", node="a")
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    result = JobRunner(job, manager, num_epochs=2).run(inproc_session)
    assert result.epoch == 2
    assert manager.open(2)["a"].load("counter") == {"n": 2}
