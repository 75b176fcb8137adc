"""Task groups: what runs together, and what is called meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jobrunner.define.arguments import COUNT, check_runs, checked
from jobrunner.define.node import (
    Active,
    Node,
    WorkspaceType,
    WorkspaceTypeName,
    as_node,
    as_workspace_type,
)
from jobrunner.define.orphans import Mark, forget_orphan, note_orphan
from jobrunner.errors import DefinitionError

if TYPE_CHECKING:
    from jobrunner.define.task import Task


class TaskGroup(Active):
    """Tasks that run together: each starts as soon as its inputs are available.

    Parameters
    ----------
    workspace_type : WorkspaceType, "global" or "private", optional
        The default for its tasks.
    """

    _active = ContextVar("jobrunner_groups", default=())

    def __init__(self, workspace_type: WorkspaceType | WorkspaceTypeName | None = None) -> None:
        self.workspace_type = as_workspace_type(workspace_type, "TaskGroup")
        self.name = "group"
        self.job_name = ""  # of the job that it belongs to
        self.made = Mark()
        self.reports: list[tuple[Node, Callable[[], Any], int]] = []
        self.is_compiled = False
        self._tasks: dict[tuple[str, str], Task] = {}
        self._name_counts: dict[tuple[str, str], int] = {}

    def add(self, task: Task) -> None:
        """Add a task that has no group yet. `Task` calls this."""
        self.check_open(f"task {task.full_name!r}")
        if task.group is not None:
            raise DefinitionError(
                f"Task {task.full_name!r} is already in the {task.group.name} group."
            )
        key = (task.node.name, task.name)
        if key in self._tasks:
            if task.has_given_name:
                raise DefinitionError(
                    f"Two tasks of the {self.name} group are called {task.full_name!r}. Names must be "
                    f"unique within a node and group: give one of them another name=."
                )
            count = self._name_counts.get(key, 1)
            while key in self._tasks:
                count += 1
                key = (task.node.name, f"{task.name}#{count}")
            self._name_counts[task.node.name, task.name] = count
            task.name = key[1]
        if not (self._tasks or self.job_name):
            note_orphan(self, task)
        self._tasks[key] = task
        task.group = self
        forget_orphan(task)

    def tasks(self) -> list[Task]:
        """Its tasks, in order of definition."""
        return list(self._tasks.values())

    def find(self, node: str, name: str) -> Task | None:
        """The task `name` of `node`, or None."""
        return self._tasks.get((node, name))

    def used_nodes(self) -> list[Node]:
        """The nodes of its tasks and reports, in order of first use."""
        nodes = [task.node for task in self._tasks.values()]
        return list(dict.fromkeys([*nodes, *(node for node, _, _ in self.reports)]))

    @checked(interval_ms=COUNT)
    def report_step(
        self, fn: Callable[[], Any], node: Node | str | None = None, interval_ms: int = 1000
    ) -> None:
        """Call `fn()` on `node` periodically while the group runs, and after the node's last task.

        Parameters
        ----------
        fn : callable
            May read ``current_task().workspace`` and ``report`` metrics.
        node : Node or str, optional
            By default `Node.current()`.
        interval_ms : int
            Milliseconds between the starts of two calls.
        """
        self.check_open("a report step")
        node = Node.current() if node is None else as_node(node, "report_step")
        if not callable(fn):
            raise DefinitionError(f"report_step: fn must be callable; got {type(fn).__name__}.")
        check_runs(fn, "report_step: fn")
        self.reports.append((node, fn, interval_ms))

    def check_open(self, what: str) -> None:
        """Refuse to add `what` to a compiled group."""
        if self.is_compiled:
            raise DefinitionError(
                f"Cannot add {what}: the {self.name} group is already compiled. Define all tasks "
                f"before compile() or run()."
            )

    def __repr__(self) -> str:
        return f"<TaskGroup {self.name!r}: {len(self._tasks)} tasks>"
