"""Where a checkpoint directory is: a path, or the URL of one."""

from __future__ import annotations

import os
import urllib.parse
import urllib.request

from jobrunner.errors import DefinitionError


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a checkpoint directory.

    Raises
    ------
    DefinitionError
        `path` is a URL of anything but files, or no path at all.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise DefinitionError(f"path is that of a directory (a str or os.PathLike); got {path!r}.")
    scheme, separator, rest = text.partition("://")
    if separator and scheme.isalnum():
        if scheme != "file":
            raise DefinitionError(
                f"{text}: checkpoints are kept in directories, and not behind {scheme}://. Name "
                f"a directory that the client and all workers have in common."
            )
        host, _, _ = rest.partition("/")
        if host not in ("", "localhost"):
            raise DefinitionError(f"{text}: a file URL names a path, file:///..., and no host.")
        text = urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
    return os.path.abspath(text)
