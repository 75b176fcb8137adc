"""4 run: a session's binding, which also runs groups of no job on its workspaces."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jobrunner.cluster.binding import Binding
from jobrunner.cluster.workers import Cluster
from jobrunner.compile import Plan, compile_group
from jobrunner.define import TaskGroup, TaskOutput
from jobrunner.errors import ExecutionError
from jobrunner.worker import GroupResult


class SessionBinding(Binding):
    """A binding that can also run groups of no job, as `Session.run` does.

    Parameters
    ----------
    cluster, name, plan, attempt, can_move, doubted, is_cut, previous
        See `Binding`.
    run_in_session : callable
        A method, which takes this binding, a group and an epoch; called while its object lives.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        plan: Plan,
        attempt: int,
        *,
        can_move: bool,
        doubted: Collection[str],
        is_cut: bool,
        previous: Mapping[str, str] | None,
        run_in_session: Callable[
            [SessionBinding, TaskGroup, int | None, float | None], GroupResult
        ],
    ) -> None:
        super().__init__(
            cluster,
            name,
            plan,
            attempt,
            can_move=can_move,
            doubted=doubted,
            is_cut=is_cut,
            previous=previous,
        )
        self._run_in_session = weakref.WeakMethod(run_in_session)
        self._keys: weakref.WeakKeyDictionary[TaskGroup, str] = weakref.WeakKeyDictionary()
        self._num_keys = 0
        self._dead_keys: list[str] = []

    def run_group(
        self, group: TaskGroup, epoch: int | None = None, deadline_seconds: float | None = None
    ) -> GroupResult:
        """Run a group that is no job's on this binding's workspaces; see `Session.run`."""
        run = self._run_in_session()
        if run is None:
            raise self.left()
        return run(self, group, epoch, deadline_seconds)

    def left(self) -> ExecutionError:
        """The error to raise where its session has let go of it."""
        return ExecutionError(
            "This binding is not its session's any more: another job was run since, or the "
            "session was closed. Bind the plan again."
        )

    # ---- for the session

    def run_alone(
        self, group: TaskGroup, epoch: int | None, deadline_seconds: float | None
    ) -> GroupResult:
        """Compile a group of no job, whose nodes are all placed, and run it."""
        if self._dead_keys:
            dead = list(self._dead_keys)
            del self._dead_keys[: len(dead)]  # in place: finalizers add to this very list
            self.forget(dead)
        plan = compile_group(group, self.blob_names())
        if group not in self._keys:
            self._num_keys += 1
            key = self._keys[group] = f"{group.name}#{self._num_keys}"
            weakref.finalize(group, self._dead_keys.append, key).atexit = False
        key = self._keys[group]
        self.ship({key: plan})
        return self.run(key, epoch=epoch, deadline_seconds=deadline_seconds)

    def fetch_output(self, output: TaskOutput) -> Any:
        """What a task returned, or part of it, in its group's last run."""
        task = output.task
        assert task.group is not None
        if task.plan is not None and task.plan is not self.plan:
            raise ExecutionError(
                f"{output} is not there any more: job {self.plan.job!r} was bound in this "
                f"session since, and what ran before went with its workspaces. Fetch before the "
                f"next job runs, or run that one in another session."
            )
        key = self._keys.get(task.group, task.group.name)
        # A resume runs some of the init group's tasks.
        keys = [key, "resume"] if key == "init" else [key]
        return self.fetch(task.node.name, task.name, keys, output.part)
