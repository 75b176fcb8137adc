"""What Linux can do besides: hints that fail only where data would be lost."""

import errno
import os
import sys

import pytest

from jobrunner.checkpoint.storage.linux import start_writing_back
from jobrunner.checkpoint.storage.posix import PosixFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def test_what_cannot_be_written_back_early_is_left_for_later():
    read, write = os.pipe()
    try:
        start_writing_back(write, 0, 1)
    finally:
        os.close(read)
        os.close(write)


def test_what_cannot_be_kept_is_an_error():
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        start_writing_back(-1, 0, 1)


def test_a_file_is_written_whole_and_in_order_while_the_disk_works(tmp_path):
    pieces = [os.urandom(size) for size in (3 << 20, 200 << 10, 5)]
    PosixFiles().write(str(tmp_path / "file"), pieces, padding_bytes=7)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces) + bytes(7)
