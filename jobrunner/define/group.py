"""Task groups: what runs together, and what is called meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jobrunner.define.checks import Count, check_call, checked
from jobrunner.define.node import (
    Active,
    Blob,
    Node,
    NodeLike,
    WorkspaceType,
    WorkspaceTypeName,
    as_node,
    as_workspace_type,
)
from jobrunner.errors import DefinitionError

if TYPE_CHECKING:
    from jobrunner.define.task import Task, TaskOutput


def final_output(value: Any) -> Any:
    """What the tasks of `TaskGroup.final_output` call."""
    return value


class TaskGroup(Active):
    """Tasks that run together: each starts as soon as its inputs are available.

    Parameters
    ----------
    workspace_type : WorkspaceType, "global" or "private", optional
        The default for its tasks.
    """

    _active = ContextVar("jobrunner_groups", default=())

    @checked
    def __init__(self, workspace_type: WorkspaceType | WorkspaceTypeName | None = None) -> None:
        self.workspace_type = as_workspace_type(workspace_type, "TaskGroup")
        self.name = "group"
        self.job_name = ""  # of the job that it belongs to
        self.reports: list[tuple[Node, Callable[[], Any], int]] = []
        self.is_compiled = False
        self._tasks: dict[tuple[str, str], Task] = {}
        self._name_counts: dict[tuple[str, str], int] = {}

    @classmethod
    def current(cls) -> TaskGroup:
        """The group of the innermost ``with`` block; `DefinitionError` if there is none.

        Inside ``with job:``, that is the job's epoch group.
        """
        group = cls._innermost()
        if group is None:
            raise DefinitionError(
                "No task group is active. Enter one first: with job.epoch_group: ..."
            )
        return group

    def add(self, task: Task) -> None:
        """Add a task that has no group yet, as `Task` does.

        Parameters
        ----------
        task : Task

        Raises
        ------
        DefinitionError
            The task has another group already, or two tasks of a node have the same name.
        """
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
        self._tasks[key] = task
        task.group = self

    def tasks(self) -> list[Task]:
        """Its tasks, in order of definition; those of `final_output` come last."""
        return sorted(self._tasks.values(), key=lambda task: task.is_final)

    def find(self, node: str, name: str) -> Task | None:
        """The task `name` of `node`, or None."""
        return self._tasks.get((node, name))

    def find_named(self, name: str, task: Task) -> Task | None:
        """The task that `task` calls by that name: of the same node, or ``node/name``."""
        node, _, name = name.rpartition("/")
        return self.find(node or task.node.name, name)

    def used_nodes(self) -> list[Node]:
        """The nodes of its tasks and reports, in order of first use."""
        nodes = [task.node for task in self._tasks.values()]
        return list(dict.fromkeys([*nodes, *(node for node, _, _ in self.reports)]))

    @checked
    def final_output(self, blob: str | Blob, node: NodeLike | None = None) -> TaskOutput:
        """Keep the value that a blob has once all tasks of the group have ended, also later ones.

        Parameters
        ----------
        blob : str or Blob
            Made by this group or an earlier one. It may be private.
        node : Node or str, optional
            Where `blob` is, if it is a str. By default `Node.current()`.

        Returns
        -------
        TaskOutput
            Its `fetch` returns the value after the group's last run.

        Raises
        ------
        DefinitionError
            An argument is invalid. If the blob does not exist, compiling the group says so.

        Notes
        -----
        Each run of the group copies the value. A global blob can be fetched without this, by
        ``session.fetch(node["name"])``.
        """
        from jobrunner.define.task import Task

        where = blob.node if isinstance(blob, Blob) and blob.node is not None else node
        task = Task(final_output, [blob], node=where, group=self)
        task.is_final = True
        return task.output()

    @checked
    def report_step(
        self, fn: Callable[[], Any], node: NodeLike | None = None, interval_ms: Count = 1000
    ) -> None:
        """Call `fn()` on `node` periodically while the group runs, and after the node's last task.

        Parameters
        ----------
        fn : callable
            May read ``current_task().workspace`` and ``report`` metrics. An error ends the run.
        node : Node or str, optional
            By default `Node.current()`.
        interval_ms : int
            Milliseconds between the starts of two calls.
        """
        self.check_open("a report step")
        node = Node.current() if node is None else as_node(node, "report_step")
        check_call(fn, 0, (), "report_step: fn")
        self.reports.append((node, fn, interval_ms))

    def check_open(self, addition: str) -> None:
        """Refuse to add something to a group that is compiled."""
        if self.is_compiled:
            raise DefinitionError(
                f"Cannot add {addition}: the {self.name} group is already compiled. Define all tasks "
                f"before compile() or run()."
            )

    def __repr__(self) -> str:
        return f"<TaskGroup {self.name!r}: {len(self._tasks)} tasks>"
