"""A store whose answers are missing, or end too soon when an object is read."""

import os
import time

import dask
import pytest

from jobrunner.checkpoint.storage.object_files import ObjectFiles
from tests.object_servers import CUT, DROP
from tests.sampling import sampled

DATA = os.urandom(1 << 20)


class Cuts:
    """Gives a verdict on the first requests, or on all."""

    def __init__(self, verdict, most=None):
        self.verdict, self.most, self.count = verdict, most, 0

    def __call__(self, request):
        self.count += 1
        return self.verdict if self.most is None or self.count <= self.most else False


def read_into(files, path):
    target = bytearray(len(DATA))
    files.read_into(path, memoryview(target), len(DATA))
    return bytes(target)


def write(files, root):
    files.put(f"{root}/w", DATA)
    return read_into(files, f"{root}/w") == DATA


def append(files, root):
    files.write_at(f"{root}/x", 1, [b"end"], len(DATA))
    return read_into(files, f"{root}/x") == DATA[:1] + b"end" + DATA[4:]


OPERATIONS = {
    "read": lambda files, root: files.read(f"{root}/x") == DATA,
    "read_into": lambda files, root: read_into(files, f"{root}/x") == DATA,
    "list_names": lambda files, root: files.list_names(root) == ["x", "y"],
    "walk": lambda files, root: [*files.walk(root)] == [("x", len(DATA)), ("y", 1)],
    "is_directory": lambda files, root: files.is_directory(root),
    "is_taken": lambda files, root: files.is_taken(f"{root}/x"),
    "write": write,
    "long": lambda files, root: files.write(f"{root}/long", [DATA] * 17) is not None,
    "create": lambda files, root: files.create(f"{root}/new", b"entry") is True,
    "create-taken": lambda files, root: files.create(f"{root}/y", b"entry") is False,
    "append": append,
    "prove-appending": lambda files, root: files.prove_appending(root) is None,
    "prove": lambda files, root: files.prove_creation(root) is None,
    "link": lambda files, root: files.link(f"{root}/x", f"{root}/z", len(DATA)),
    "remove_file": lambda files, root: files.remove_file(f"{root}/x") is None,
    "remove_tree": lambda files, root: files.remove_tree(root) or files.list_names(root) == [],
}


def check(s3, names, verdict, most):
    for name in names:
        files = ObjectFiles(f"{s3.url}/{name}")
        files.put(f"{files.root}/x", DATA)
        files.put(f"{files.root}/y", b"y")
        s3.watch = Cuts(verdict, most)
        assert OPERATIONS[name](files, files.root), name
        assert s3.watch.count, name
        s3.watch = lambda _: False


def test_reads_and_writes_survive_answers_that_are_cut(s3):
    check(s3, ("read", "read_into", "is_taken", "write", "long", "create", "append"), CUT, 2)


@sampled("names", sample=["list_names"], nightly=[*OPERATIONS])
def test_every_operation_survives_connections_that_are_dropped_for_seconds(s3, names):
    check(s3, names, DROP, 12)


def test_a_store_that_drops_every_connection_is_given_up_after_the_time_configured(s3):
    with dask.config.set({"jobrunner.checkpoint.retry-seconds": 0.2}):
        files = ObjectFiles(f"{s3.url}/dropped")
        s3.watch = Cuts(DROP)
        started = time.monotonic()
        with pytest.raises(OSError, match=r"retry_timeout: ?200ms"):
            files.list_names(files.root)
    assert time.monotonic() - started < 10
