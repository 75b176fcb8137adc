"""A store whose answers are missing, or end too soon when an object is read."""

import os
import time

import dask
import pytest

from jobrunner.checkpoint.storage import object_files
from jobrunner.checkpoint.storage.object_files import ObjectFiles
from tests.object_servers import CUT, DROP

DATA = os.urandom(1 << 20)


def spoil(verdict, most):
    """Give a verdict on the first requests."""
    verdicts = [verdict] * most
    return lambda request: verdicts.pop() if verdicts else False


def append(files, root):
    files.write_at(f"{root}/x", 1, [b"end"], len(DATA))
    return files.read(f"{root}/x") == DATA[:1] + b"end" + DATA[4:]


OPERATIONS = {
    "read": lambda files, root: files.read(f"{root}/x") == DATA,
    "list_names": lambda files, root: files.list_names(root) == ["x", "y"],
    "write": lambda files, root: files.write(f"{root}/long", [DATA] * 17) is not None,
    "create": lambda files, root: files.create(f"{root}/new", b"entry") is True,
    "create-taken": lambda files, root: files.create(f"{root}/y", b"entry") is False,
    "append": append,
    "prove-appending": lambda files, root: files.prove_appending(root) is None,
    "prove-creation": lambda files, root: files.prove_creation(root) is None,
    "link": lambda files, root: files.link(f"{root}/x", f"{root}/z", len(DATA)),
    "remove": lambda files, root: files.remove_tree(root) or files.list_names(root) == [],
}


@pytest.mark.parametrize(
    ("names", "verdict", "most"),
    [
        (["read", "write", "create", "append"], CUT, 2),
        (["list_names"], DROP, 12),
        pytest.param([*OPERATIONS], DROP, 12, marks=pytest.mark.nightly),
    ],
    ids=["cut", "dropped", "dropped, all"],
)
def test_operations_survive_answers_that_are_cut_and_connections_that_are_dropped(
    s3, names, verdict, most, monkeypatch
):
    monkeypatch.setattr(object_files, "_LONGEST_PAUSE_SECONDS", 0.05)
    for name in names:
        files = ObjectFiles(f"{s3.url}/{name}")
        files.put(f"{files.root}/x", DATA)
        files.put(f"{files.root}/y", b"y")
        s3.watch = spoil(verdict, most)
        assert OPERATIONS[name](files, files.root), name


def test_a_store_that_drops_every_connection_is_given_up_after_the_time_configured(s3):
    with dask.config.set({"jobrunner.checkpoint.retry-seconds": 0.2}):
        files = ObjectFiles(f"{s3.url}/dropped")
        s3.watch = lambda request: DROP
        started = time.monotonic()
        with pytest.raises(OSError, match=r"retry_timeout: ?200ms"):
            files.list_names(files.root)
    assert time.monotonic() - started < 10
