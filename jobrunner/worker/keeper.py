"""What captures the workspaces of a binding between two epochs, on each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jobrunner.errors import ExecutionError
from jobrunner.positions import Position
from jobrunner.workspace import Workspace


class Keeper(Protocol):
    """One lives on each worker of a binding, from `Binding.keep` to the binding's end."""

    def capture(self, at: Position, workspaces: Mapping[str, Workspace]) -> None:
        """Refer to, or copy, what the workspaces of this worker hold after epoch `at`.

        Runs in a thread of the tasks: after the epoch's last task here, and before the next epoch
        begins here. An error that it raises ends the run. Workers whose nodes have no task in the
        group take no part in its runs, and capture nothing: nothing changes their values.
        """

    def room(self) -> tuple[int, int]:
        """The bytes that one capture takes, and those that are free; at once, in any thread."""

    def close(self) -> None:
        """Drop everything. Runs in a thread, when the binding ends or another keeper comes."""


@dataclass(eq=False)
class Premises:
    """What calls from the client work on: see `Binding.apply`."""

    workspaces: dict[str, Workspace]  # of this worker's nodes
    keeper: Keeper | None = None


def install_keeper(factory: Callable[[], Keeper], premises: Premises) -> None:
    """Make a keeper, in place of an earlier one."""
    previous, premises.keeper = premises.keeper, None
    if previous is not None:
        previous.close()
    premises.keeper = factory()


def call_keeper(fn: Callable[[Keeper, Mapping[str, Workspace]], Any], premises: Premises) -> Any:
    """Call a function with the keeper and the workspaces."""
    if premises.keeper is None:
        raise ExecutionError("This worker keeps no captures: Binding.keep was not called.")
    return fn(premises.keeper, premises.workspaces)


def call_on_workspaces(fn: Callable[[dict[str, Workspace]], Any], premises: Premises) -> Any:
    """Call a function with a copy of the dictionary of workspaces."""
    return fn(dict(premises.workspaces))
