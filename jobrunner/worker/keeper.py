"""What captures the workspaces of a binding between two epochs, on each worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jobrunner.positions import Position
from jobrunner.workspace import Workspace


class Keeper(Protocol):
    """One lives on each worker of a binding, from `Binding.keep` to the binding's end."""

    def capture(self, workspaces: Mapping[str, Workspace], *, at: Position) -> object:
        """Refer to, or copy, what the workspaces of this worker hold after epoch `at`.

        Runs in a thread of the tasks: after the epoch's last task here, and before the next epoch
        begins here. An error that it raises ends the run. Workers whose nodes have no task in the
        group take no part in its runs, and capture nothing: nothing changes their values.
        """

    def capture_bytes(self) -> int:
        """The bytes that one capture takes; at once, in any thread."""

    def close(self) -> None:
        """Drop everything. Runs in a thread, when the binding ends or another keeper comes."""
