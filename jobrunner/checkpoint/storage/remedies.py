"""What to do when a write to a checkpoint directory fails."""

from __future__ import annotations

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_remedy(error: BaseException, path: str) -> str:
    """What to do about a write to directory `path` that failed, as the end of a message."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        prune = f"`jobrunner prune {path} --keep-last N`"
        return f"Make room: delete other files, or call {prune}, which itself needs 32 KiB."
    if number in _REFUSED:
        return "Name a directory in which this user may write, or get the right to write there."
    return "Repair the storage."
