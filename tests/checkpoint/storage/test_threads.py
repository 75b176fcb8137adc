"""How many threads a save or a load gets."""

import threading
from functools import partial

import pytest

from jobrunner.checkpoint.storage.object_files import ObjectFiles
from jobrunner.checkpoint.storage.parallel import THREADS, run_all

MANY = 200


def test_short_local_work_stays_in_one_thread():
    threads = set()
    run_all([lambda: threads.add(threading.get_ident())] * MANY, THREADS, 0)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize(
    ("threads", "nbytes"),
    [(THREADS, 1 << 20), (ObjectFiles.threads, 0), (ObjectFiles.lookups, 0)],
    ids=["long", "far away", "removed far away"],
)
def test_long_or_remote_work_is_shared_at_once(threads, nbytes):
    met = threading.Barrier(threads, timeout=30)
    run_all([met.wait] * threads, threads, nbytes)


@pytest.mark.parametrize("failing", [0, MANY - 1])
def test_the_first_error_stops_all_jobs(failing):
    done = []

    def work(i):
        if i == failing:
            raise OSError(i)
        done.append(i)

    with pytest.raises(OSError, match=str(failing)):
        run_all([partial(work, i) for i in range(MANY)], THREADS, 0)
    assert done == list(range(failing))
