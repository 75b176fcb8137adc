"""A job resumes in a directory with links to elsewhere, which a stranger may have put there."""

import shutil

import numpy as np
import pytest

from jobrunner import CheckpointError, Job, JobRunner, KeepLast, Node, Task, epoch_limiter
from jobrunner import MultiNodeCheckpointManager as Manager


def counting(epochs):
    with Job("counting") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.zeros(3), outputs="n", name="zero")
        Task(lambda n: n + 1, inputs="n", outputs="n", name="add")
        epoch_limiter(job, epochs)
    return job


def contents(path):
    """What there is, and when it was changed; to look at it changes no more than the access time."""
    return {
        at: (it.st_ino, it.st_mode, it.st_nlink, it.st_size, it.st_mtime_ns, it.st_ctime_ns)
        for at in path.rglob("*")
        for it in (at.lstat(),)
    }


@pytest.mark.parametrize(
    ("place", "resumed_from"),
    [
        *((place, None) for place in ("_runs", "_log", "_log/0000000002.json")),
        *((place, 0) for place in ("a.1", "a.1/n", "a.1/n/c.0", "a.1/zarr.json")),
        *((place, 1) for place in ("_runs/x", "a.0", "a.1/stray")),
    ],
)
def test_a_resume_touches_nothing_elsewhere(place, resumed_from, inproc_session, tmp_path):
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    JobRunner(counting(1), Manager(runs, keep=KeepLast(2))).run(inproc_session)
    (outside / "below").mkdir(parents=True)
    path, target = runs / place, outside
    if path.exists():
        target = outside / path.name
        shutil.move(path, target)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    before = contents(outside)
    manager = Manager(runs, keep=KeepLast(1))
    run = JobRunner(counting(3), manager).run
    if resumed_from is None:
        with pytest.raises(CheckpointError, match=f"{runs / place} is a symbolic link"):
            run(inproc_session)
    else:
        assert run(inproc_session).resumed_from == resumed_from
        assert manager.epochs()[-1] == 3
    assert contents(outside) == before
