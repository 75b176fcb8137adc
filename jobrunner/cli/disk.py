"""What stores take on the disk, where unchanged chunks of several epochs are one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jobrunner.checkpoint import Directory

_BLOCK_BYTES = 512  # of `st_blocks`, on every file system


class DiskSpace(NamedTuple):
    """In bytes, of some stores."""

    used: int
    freed: int
    """If they are deleted: files that others share stay."""


def measure(directory: Directory, stores: Iterable[str]) -> DiskSpace | None:
    """Look at every file of some stores; None for a URL, whose storage does not tell."""
    from jobrunner.checkpoint import is_url

    if is_url(directory.path):
        return None
    sizes: dict[tuple[int, int], int] = {}
    names_left: dict[tuple[int, int], int] = {}  # of a file, outside of these stores
    for store in stores:
        root = os.path.join(directory.path, store)
        with contextlib.suppress(OSError):  # deleted meanwhile, or a link, which is not followed
            for name, _ in directory.files.walk(root):
                status = os.lstat(os.path.join(root, name))
                file = (status.st_dev, status.st_ino)
                sizes[file] = status.st_blocks * _BLOCK_BYTES
                names_left[file] = names_left.get(file, status.st_nlink) - 1
    freed = sum(size for file, size in sizes.items() if names_left[file] <= 0)
    return DiskSpace(sum(sizes.values()), freed)
