"""Tasks, their outputs, and groups: what runs together, and what is called meanwhile.

A `Task` made inside ``with group:`` joins that group; one made inside ``with Node("a"):`` runs on
that node. This lets library code add tasks to the active group and node.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Union

from jobrunner.define.checks import (
    Count,
    Interval,
    Natural,
    check_call,
    check_runs,
    checked,
    constants_of,
    dask_hint,
    read_setup,
)
from jobrunner.define.dask_arguments import is_lazy, leaves
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
from jobrunner.define.parameters import read_arguments, sequence
from jobrunner.errors import DefinitionError, ExecutionError
from jobrunner.names import check_name


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
        self.reports: list[tuple[Node, Callable[[], Any], float]] = []
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
        nodes += [node for node, _, _ in self.reports]
        return list(dict.fromkeys(nodes))

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
        if isinstance(blob, Blob) and blob.node is not None:
            node = blob.node
        task = Task(final_output, [blob], node=node, group=self)
        task.is_final = True
        return task.output()

    @checked
    def report_step(
        self,
        fn: Callable[[], Any],
        node: NodeLike | None = None,
        interval_seconds: Interval = 1.0,
    ) -> None:
        """Call `fn()` on `node` periodically while the group runs, and after the node's last task.

        Parameters
        ----------
        fn : callable
            May read ``current_task().workspace`` and ``report`` metrics. An error ends the run.
        node : Node or str, optional
            By default `Node.current()`.
        interval_seconds : float
            Between the starts of two calls.
        """
        self.check_open("a report step")
        node = Node.current() if node is None else as_node(node, "report_step")
        check_call(fn, 0, (), "report_step: fn")
        self.reports.append((node, fn, interval_seconds))

    def check_open(self, addition: str) -> None:
        """Refuse to add something to a group that is compiled."""
        if self.is_compiled:
            raise DefinitionError(
                f"Cannot add {addition}: the {self.name} group is already compiled. Define all tasks "
                f"before compile() or run()."
            )

    def __repr__(self) -> str:
        return f"<TaskGroup {self.name!r}: {len(self._tasks)} tasks>"


@dataclass(eq=False, slots=True)
class TaskOutput:
    """The value that a task returns in one run of its group, or one part of it.

    A task of the same group reads exactly this value, even if another task writes the blob later.
    A task of another group reads the blob's current value; the blob must be global.
    """

    task: Task
    part: int

    @property
    def blob(self) -> Blob | None:
        """The blob that this value fills, if any."""
        if not self.task.output_blobs:
            return None
        return self.task.output_blobs[self.part]

    def fetch(self) -> Any:
        """Copy the value to the client; possible until the task's group runs again.

        Raises
        ------
        ExecutionError
            The task has not run in an open session, or the session has run another job since.

        Notes
        -----
        Runs on the client.
        """
        session = self.task.session
        if session is None:
            raise ExecutionError(
                f"{self} has no value: its task has not run in an open session. Run its job or "
                f"group, and fetch before the session closes."
            )
        return session.fetch(self)

    def __repr__(self) -> str:
        return f"TaskOutput({self.task.full_name!r}, {self.part})"


# Built from strings: `Task` is defined below.
Input = Union[str, Blob, TaskOutput, "Task"]
Inputs = Input | Sequence[Input] | Mapping[str, Input | Sequence[Input]] | None
Outputs = str | Blob | Sequence[str | Blob]
Updates = Outputs | Mapping[str, str | Blob]
After = Union["Task", str, Sequence[Union["Task", str]]]


class Task:
    """One call of a plain function on a node.

    Parameters
    ----------
    fn : callable
        Called with plain values. NumPy arrays among the inputs are read-only views;
        those of Python objects are copies.
    inputs : str, Blob, TaskOutput, Task, or a sequence or mapping of them, optional
        A str names a blob of the task's own node; a task stands for its one output. In a sequence,
        they are passed in order: ``fn(*inputs, *updates, **kwargs)``. A mapping says which
        parameter of `fn` gets which input, or a list of inputs: ``{"parts": [a["x"], b["x"]]}``.
        Parameters without a default that neither it nor `updates` nor `kwargs` names get the blobs
        of their own names. If `inputs` is omitted, all are found so; ``()`` passes none.
    outputs : str, Blob, or a sequence of them
        Blobs of the task's own node that the return value fills: one blob takes the value,
        several take the items of a sequence of that length.
    updates : str, Blob, or a sequence or mapping of them
        Blobs of the task's own node that `fn` changes in place. Where `inputs` are given by name,
        each goes to the parameter of its name; a mapping names other parameters.
    kwargs : mapping, optional
        Keyword arguments, the same in every run. Those of a task of the init group may be, or hold in
        lists, tuples and dicts, Dask collections, `Delayed` objects and futures: these are computed on
        the cluster when the task is about to run, and `fn` gets the values.
    name : str, optional
        Unique within its node and group. By default the function's name, with a number if needed.
    node : Node or str, optional
        By default `Node.current()`.
    group : TaskGroup, optional
        By default the active one of this thread, if any. Only `Session.run` runs a task without a
        group.
    workspace_type : WorkspaceType, "global" or "private", optional
        Overrides the group's.
    num_instances : int
        Number of calls, which run concurrently in threads. ``current_task().instance`` is the
        number of a call. The task returns the list of their values.
    setup : mapping of str to callable, optional
        What to make before the calls: a parameter of `fn`, and a function without arguments whose
        value that parameter gets, one value for all instances. If it is a generator function, the
        parameter gets what it yields, and what follows ``yield`` runs after the last call has
        ended, also by an error.
    instance_setup : mapping of str to callable, optional
        The same for each instance, in its thread, after `setup`.
    transient_errors : type or tuple of types
        Exceptions after which a `JobRunner` resumes from the last recorded epoch, as after a lost
        worker, up to `max_restarts` times. Other exceptions end the run.
    every : int
        For a task of the epoch group: it runs only in each step of an epoch whose number, counted
        from 1, is a multiple of this. In the other steps its blobs stay as they are. What reads its
        `TaskOutput` must run at the same interval, or at a multiple of it.
    after : Task, str, or a sequence of them
        Tasks of the same group that must end first. A str is the name of a task of the same node,
        or ``"node/name"``; that task may be defined later.

    Raises
    ------
    DefinitionError
        An argument is invalid.
    """

    @checked
    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Inputs = None,
        outputs: Outputs = (),
        *,
        updates: Updates = (),
        kwargs: (Annotated[Mapping[str, Any], "a mapping of names (str) to values"] | None) = None,
        name: str | None = None,
        node: NodeLike | None = None,
        group: Annotated[TaskGroup, "a TaskGroup, such as job.init_group"] | None = None,
        workspace_type: WorkspaceType | WorkspaceTypeName | None = None,
        num_instances: Count = 1,
        setup: Mapping[str, Callable[[], Any]] | None = None,
        instance_setup: Mapping[str, Callable[[], Any]] | None = None,
        transient_errors: type[BaseException] | tuple[type[BaseException], ...] = (),
        every: Count = 1,
        after: After = (),
    ) -> None:
        self.node = Node.current() if node is None else as_node(node, f"Task {name or fn!r}")
        self.fn = fn
        self.has_given_name = name is not None
        self.name = check_name(name, "task") if name is not None else _name_of(fn)
        self.group: TaskGroup | None = None
        # The session that last ran the task, and its plan: `TaskOutput.fetch` needs them.
        self.session: Any = None
        self.plan: Any = None
        self.retained_parts: set[int] = set()  # that `TaskOutput.fetch` may ask for
        self.lazy_parameters: tuple[str, ...] = ()  # the `kwargs` that hold Dask collections
        self.is_final = False  # runs after all others: see `TaskGroup.final_output`

        self.kwargs = self._check_call(kwargs or {})
        if not isinstance(updates, Mapping):
            updates = self._own_blobs(updates, "updates")
        where = f"Task {self.full_name!r}"
        self.setup = read_setup(setup, f"{where}: setup")
        self.instance_setup = read_setup(instance_setup, f"{where}: instance_setup")
        keywords = [*self.kwargs, *self.setup, *self.instance_setup]
        if len(set(keywords)) < len(keywords):
            raise DefinitionError(
                f"{where}: kwargs, setup and instance_setup name a parameter twice: {keywords}."
            )
        arguments = read_arguments(fn, inputs, updates, keywords, where)
        self.inputs = tuple(self._input(value) for value in arguments.inputs)
        self.updates = self._own_blobs(arguments.updates, "updates")
        self.places, self.implied = arguments.places, arguments.implied
        self.output_blobs = self._own_blobs(outputs, "outputs")
        self.workspace_type = as_workspace_type(workspace_type, f"Task {self.full_name!r}")
        self.num_instances = num_instances
        self.every = every
        self.transient_errors = sequence(transient_errors)
        self.after: tuple[Task | str, ...] = sequence(after)
        self._check()

        group = TaskGroup._innermost() if group is None else group
        if group is not None:
            group.add(self)
        self._needs_group = True

    # On the class, for tasks whose constructor raised: the error has told all, and `group` is not set.
    _needs_group = False

    # The default holds the function until the interpreter ends, when modules are empty already.
    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if self._needs_group and self.group is None:
            _warn(
                f"Task {self.full_name!r} is in no group, so it never ran. Make tasks inside the `with` "
                f"block of their job or of one of its groups, in the same thread; in another thread, "
                f"pass the group, as in group=job.epoch_group.",
                RuntimeWarning,
                stacklevel=2,
            )

    @classmethod
    def on_each(
        cls,
        nodes: Sequence[Node | str],
        fn: Callable[..., Any],
        inputs: Inputs | Callable[[int], Inputs] = None,
        outputs: Outputs | Callable[[int], Outputs] = (),
        *,
        updates: Updates | Callable[[int], Updates] = (),
        kwargs: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        after: After | Callable[[int], After] = (),
        **options: Any,
    ) -> list[Task]:
        """Make a task on each of `nodes`.

        Parameters
        ----------
        nodes : sequence of Node or str
            At least one.
        fn : callable
        inputs, outputs, updates, kwargs, after : optional
            As of `Task`. Each may also be a function, which is called with the index of each node
            and returns that of its task: ``kwargs=lambda i: {"seed": i}``.
        **options
            Other arguments of `Task`, the same for all.

        Returns
        -------
        list of Task
            In the order of `nodes`.

        Raises
        ------
        DefinitionError
            An argument is invalid.
        """
        where = f"Task.on_each {options.get('name') or _name_of(fn)!r}"
        if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not nodes:
            raise DefinitionError(f"{where}: nodes must be a list of nodes; got {nodes!r}.")
        if "node" in options:
            raise DefinitionError(f"{where}: got node=; name the nodes in nodes.")
        by_argument: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "updates": updates}
        by_argument |= {"kwargs": kwargs, "after": after}
        tasks = []
        for i, node in enumerate(nodes):
            own = dict(options)
            for argument, value in by_argument.items():
                own[argument] = value(i) if callable(value) else value
            tasks.append(cls(fn, node=node, **own))
        return tasks

    @property
    def full_name(self) -> str:
        """``node/name``."""
        return f"{self.node.name}/{self.name}"

    @property
    def blob_type(self) -> WorkspaceType | None:
        """The workspace type of the task, or else of its group."""
        if self.workspace_type is None and self.group is not None:
            return self.group.workspace_type
        return self.workspace_type

    @checked
    def output(self, i: Natural = 0) -> TaskOutput:
        """Part `i` of the return value. Without `outputs`, part 0 is the whole value.

        Workers keep a copy of it until the group runs again, for `TaskOutput.fetch`.
        """
        count = max(1, len(self.output_blobs))
        if i >= count:
            raise DefinitionError(f"Task {self.full_name!r} has {count} output(s); asked for {i}.")
        self.retained_parts.add(i)
        return TaskOutput(self, i)

    def outputs(self) -> list[TaskOutput]:
        """All parts of the return value."""
        return [self.output(i) for i in range(max(1, len(self.output_blobs)))]

    def __repr__(self) -> str:
        return f"Task({self.full_name!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What ran it stays in this process, and only here its group may have been forgotten.
        return {**vars(self), "session": None, "plan": None, "_needs_group": False}

    def _input(self, value: object) -> Blob | TaskOutput:
        if isinstance(value, TaskOutput):
            return value
        if isinstance(value, str):
            return Blob(value, self.node)
        if isinstance(value, Blob):
            return Blob(value.name, value.node or self.node)
        if isinstance(value, Task):
            if len(value.output_blobs) > 1:
                raise DefinitionError(
                    f"Task {self.full_name!r}: task {value.full_name!r}, one of its inputs, has "
                    f"{len(value.output_blobs)} outputs. Pass one of them: task.output(0)."
                )
            return TaskOutput(value, 0)
        expected = "inputs must be blobs' names, Blobs, TaskOutputs or Tasks"
        advice = "pass constants in kwargs= or with functools.partial"
        if isinstance(value, list | tuple):
            advice = "name the parameter that gets a list of inputs: inputs={'parts': [...]}"
        raise self._wrong_type(expected, value, advice)

    def _wrong_type(self, expected: str, value: object, advice: str = "") -> DefinitionError:
        text = f"Task {self.full_name!r}: {expected}; got {type(value).__name__}."
        hint = dask_hint(value) or advice
        if hint:
            text += f" To fix it, {hint}."
        return DefinitionError(text)

    def _own_blobs(self, values: object, argument: str) -> tuple[Blob, ...]:
        blobs = []
        for value in sequence(values):
            if not isinstance(value, str | Blob):
                raise self._wrong_type(f"{argument} must be names or Blobs", value)
            blob = Blob(value) if isinstance(value, str) else value
            if blob.node is not None and blob.node != self.node:
                raise DefinitionError(
                    f"Task {self.full_name!r}: {argument} name blob {blob.name!r} of node "
                    f"{blob.node.name!r}, but a task writes to its own node only. Return the "
                    f"value, and read it in a task of {blob.node.name!r} as a TaskOutput."
                )
            blobs.append(blob.on(self.node))
        return tuple(blobs)

    def _check_call(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        where = f"Task {self.full_name!r}"
        if not callable(self.fn):
            raise self._wrong_type("fn must be callable", self.fn, "pass a function")
        check_runs(self.fn, f"{where}: fn")
        eager = dict(kwargs)
        for name, value in kwargs.items():
            if any(map(is_lazy, leaves(value))):
                self.lazy_parameters += (name,)
                del eager[name]
        for value in constants_of(self.fn, eager):
            hint = dask_hint(value)
            if hint:
                raise DefinitionError(
                    f"{where}: got {type(value).__name__} as a constant argument. "
                    f"To fix it, {hint}."
                )
        return dict(kwargs)

    def _check(self) -> None:
        where = f"Task {self.full_name!r}"
        for kind in self.transient_errors:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise DefinitionError(
                    f"{where}: transient_errors must be exception classes; got {kind!r}."
                )
        for task in self.after:
            if not isinstance(task, Task | str):
                raise self._wrong_type("after must be tasks or their names", task)
        for argument, blobs in (("updates", self.updates), ("outputs", self.output_blobs)):
            if len(set(blobs)) < len(blobs):
                raise DefinitionError(f"{where}: {argument} name a blob twice: {list(blobs)}.")
        for argument, values in (("inputs", self.inputs), ("outputs", self.output_blobs)):
            for blob in self.updates:
                if blob in values:
                    raise DefinitionError(
                        f"{where}: blob {blob.name!r} is in {argument} and in updates. An updated blob "
                        f"is passed to fn and counts as written: name it in updates only."
                    )


def _name_of(fn: object) -> str:
    while isinstance(fn, functools.partial) and not hasattr(fn, "__name__"):
        fn = fn.func
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return check_name(name.strip("<>"), "task")
