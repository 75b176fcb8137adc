"""The job: its task groups, and the conditions that end it and its epochs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Self

from jobrunner.define.checks import NATURAL, Count, Rule, checked
from jobrunner.define.node import Active, Blob, Node, WorkspaceType, as_node
from jobrunner.define.task import Task, TaskGroup, TaskOutput
from jobrunner.errors import DefinitionError
from jobrunner.names import check_name
from jobrunner.texts import Html, card, counted_names, table, tag

if TYPE_CHECKING:
    from jobrunner.compile import Plan

_LIST = Rule("a list", lambda value: isinstance(value, Iterable) and not isinstance(value, str))
_SEED = Rule("an int >= 0 and < 2**64", lambda seed: NATURAL.fits(seed) and seed < 1 << 64, int)


class Job(Active):
    """A stateful job: init once, epochs until a stop condition, download, exit.

    Tasks defined inside ``with job:`` join its epoch group.

    Parameters
    ----------
    name : str, optional
    init_group, epoch_group, download_group, exit_group : TaskGroup, optional
        By default a new, empty group.
    epoch_end_group : TaskGroup, optional
        Runs once at the end of each epoch, after its last step: validation, for example. By default
        a new, empty group.
    stop_conditions : sequence of TaskOutput or Blob, optional
        The job ends after an epoch in which one of them is true; see `add_stop_condition`.
    nodes_to_checkpoint : sequence of Node or str, optional
        By default the nodes of the init group, and those on which the epoch group makes global
        blobs.
    steps_per_epoch : int
        How many steps an epoch has: how often the epoch group runs.
    seed : int
        The seed of every ``current_task().rng``: from 0 to 2**64 - 1.
    seed_global_rng : bool
        Call the functions of all tasks as if they were `seeded`: what they draw from the global
        generators of Python, NumPy and PyTorch is the same in every run. They take turns in each
        worker process.

    Attributes
    ----------
    parameters : dict
        What the function with `@job` that made it was called with; else empty.

    Examples
    --------
    >>> with Job("count") as job:
    ...     with job.init_group:
    ...         _ = Task(lambda: 0, outputs="n")
    ...     done = Task(lambda n: n + 1, inputs="n", outputs="n").output()
    >>> epoch_limiter(job, 3)
    >>> [task.name for task in job.epoch_group.tasks()]
    ['lambda']
    """

    _active = ContextVar("jobrunner_jobs", default=())

    @checked
    def __init__(
        self,
        name: str | None = None,
        *,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        epoch_end_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: Annotated[Sequence[TaskOutput | Blob], _LIST] | None = None,
        nodes_to_checkpoint: Annotated[Sequence[Node | str], _LIST] | None = None,
        steps_per_epoch: Count = 1,
        seed: Annotated[int, _SEED] = 0,
        seed_global_rng: bool = False,
    ) -> None:
        self.name = check_name("job" if name is None else name, "job")
        self._roles = self._adopt(
            init=init_group,
            epoch=epoch_group,
            epoch_end=epoch_end_group,
            download=download_group,
            exit=exit_group,
        )
        self.steps_per_epoch = steps_per_epoch
        self.seed = seed
        self.seed_global_rng = seed_global_rng
        self.epoch_limit: int | None = None
        self.parameters: dict[str, Any] = {}
        self.stop_conditions: list[TaskOutput | Blob] = []
        for condition in stop_conditions or ():
            self.add_stop_condition(condition)
        self._nodes_to_checkpoint: list[Node] | None = None
        if nodes_to_checkpoint is not None:
            where = f"Job {self.name!r}: nodes_to_checkpoint"
            self._nodes_to_checkpoint = [as_node(node, where) for node in nodes_to_checkpoint]
        for role, group in self._roles.items():  # last: a job that is refused takes no group
            group.name, group.job_name = role, self.name

    @property
    def init_group(self) -> TaskGroup:
        """Runs once, before the first epoch."""
        return self._roles["init"]

    @property
    def epoch_group(self) -> TaskGroup:
        """Runs at each step of each epoch."""
        return self._roles["epoch"]

    @property
    def epoch_end_group(self) -> TaskGroup:
        """Runs once at the end of each epoch, after its last step."""
        return self._roles["epoch_end"]

    @property
    def download_group(self) -> TaskGroup:
        """Runs once, after the last epoch."""
        return self._roles["download"]

    @property
    def exit_group(self) -> TaskGroup:
        """Runs last."""
        return self._roles["exit"]

    @property
    def groups(self) -> dict[str, TaskGroup]:
        """The groups by name, in the order they run; an epoch end group only if it does anything."""
        groups = dict(self._roles)
        if not (self.epoch_end_group.tasks() or self.epoch_end_group.reports):
            del groups["epoch_end"]
        return groups

    @classmethod
    def current(cls) -> Job:
        """The job of the innermost ``with`` block; `DefinitionError` if there is none."""
        job = cls._innermost()
        if job is None:
            raise DefinitionError("No job is active. Enter one first: with Job(...) as job: ...")
        return job

    @checked
    def add_stop_condition(self, condition: TaskOutput | Blob | Task) -> None:
        """Stop after the first epoch that ends with ``bool(condition)`` true.

        Parameters
        ----------
        condition : TaskOutput, Blob or Task
            A task stands for its first output. A blob must name its node. An array must have one
            element.
        """
        self.stop_conditions.append(self._condition(condition))

    def nodes_to_checkpoint(self) -> list[Node]:
        """The nodes whose workspaces are saved: those given to `Job`, or its default."""
        if self._nodes_to_checkpoint is not None:
            return list(dict.fromkeys(self._nodes_to_checkpoint))
        nodes = self.init_group.used_nodes()
        for task in (*self.epoch_group.tasks(), *self.epoch_end_group.tasks()):
            is_global = task.blob_type is WorkspaceType.GLOBAL
            if any(is_global or blob.history for blob in task.output_blobs):
                nodes.append(task.node)
        return list(dict.fromkeys(nodes))

    def compile(self) -> Plan:
        """Check the whole job and plan what runs on which node, and in which order.

        Raises
        ------
        DefinitionError
            The job cannot run: a task reads a blob that no task makes, tasks wait for each other,
            and the like. The message names the task.

        Notes
        -----
        Runs on the client, without I/O. The groups accept no more tasks afterwards.
        """
        from jobrunner.compile import compile_job

        return compile_job(self)

    def _repr_html_(self) -> Html:
        rows = []
        for name, group in self.groups.items():
            tasks = group.tasks()
            blobs: dict[str, None] = {}
            for task in tasks:
                blobs |= dict.fromkeys(blob.name for blob in (*task.output_blobs, *task.updates))
            nodes = counted_names([node.name for node in group.used_nodes()])
            rows.append((name, len(tasks), nodes, counted_names(blobs)))
        ends = []
        for condition in self.stop_conditions:
            if isinstance(condition, TaskOutput):
                ends.append(condition.task.full_name)
            else:
                ends.append("/".join(condition.key))
        if self.epoch_limit is not None:
            ends.append(f"epoch {self.epoch_limit}")
        limit = "no stop condition yet"
        if ends:
            limit = f"until {' or '.join(ends)}"
        saved = counted_names([node.name for node in self.nodes_to_checkpoint()])
        return card(
            "Job",
            self.name,
            table(("group", "tasks", "nodes", "writes"), rows, left=(0, 2, 3)),
            tag("div", limit),
            tag("div", f"saved nodes: {saved}"),
        )

    def __enter__(self) -> Self:
        self.epoch_group.__enter__()
        return super().__enter__()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        self.epoch_group.__exit__()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(group.tasks())}" for name, group in self.groups.items())
        return f"<Job {self.name!r}: tasks {sizes}>"

    def _condition(self, condition: object) -> TaskOutput | Blob:
        self.epoch_group.check_open("a stop condition")
        if isinstance(condition, Task):
            condition = condition.output()
        if not isinstance(condition, TaskOutput | Blob):
            raise DefinitionError(
                f"Job {self.name!r}: a stop condition must be a TaskOutput or a Blob; got "
                f"{type(condition).__name__}."
            )
        if isinstance(condition, Blob) and condition.node is None:
            raise DefinitionError(
                f"Job {self.name!r}: the stop condition {condition!r} names no node; write "
                f"node[{condition.name!r}]."
            )
        return condition

    def _adopt(self, **groups: TaskGroup | None) -> dict[str, TaskGroup]:
        """The groups by role, new ones where none is given."""
        roles: dict[str, TaskGroup] = {}
        for role, given_group in groups.items():
            group = TaskGroup() if given_group is None else given_group
            former_role = ""
            if group.job_name and group.name != role:
                former_role = f"the {group.name} group of job {group.job_name!r}"
            for name, earlier_group in roles.items():
                if earlier_group is group:
                    former_role = f"its {name} group"
            if former_role:
                raise DefinitionError(
                    f"Job {self.name!r}: the {role} group is already {former_role}. A group has one "
                    f"role: make another TaskGroup, with tasks of its own."
                )
            roles[role] = group
        return roles


@checked
def epoch_limiter(job: Job, num_epochs: Count) -> None:
    """Stop `job` after `num_epochs` epochs in all, counted across resumes.

    To continue a finished job, run it again with a higher limit.
    """
    job.epoch_group.check_open("an epoch limit")
    job.epoch_limit = num_epochs
