"""The global blobs of a workspace as a mapping, which settles what is set in it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from jobrunner.workspace import Workspace, settle


class Blobs(MutableMapping[str, Any]):
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __getitem__(self, name: str) -> Any:
        self.workspace.globals[name]  # KeyError
        return self.workspace.value(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.workspace.put(name, settle([value]))

    def __delitem__(self, name: str) -> None:
        del self.workspace.globals[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.workspace.globals)

    def __len__(self) -> int:
        return len(self.workspace.globals)


def updated(workspace: Workspace, name: str, change: Any) -> None:
    """Let ``change(value)`` update a blob, as a task does."""
    change(workspace.take(name))
    workspace.put(name, settle(workspace.globals[name].box))
