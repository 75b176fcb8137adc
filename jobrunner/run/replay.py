"""Run a recorded epoch again from the one before it, and compare the result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from msgspec import structs

from jobrunner.checkpoint import REGISTERED_CODECS, Codec, Directory, EpochRecord, verify_record
from jobrunner.cluster import Binding, GroupResult, Session
from jobrunner.compile import GroupPlan, Plan, PlannedTask, UpdateArgument, changes, describe
from jobrunner.define import Job, Metric
from jobrunner.json_output import with_json_positions
from jobrunner.positions import Position, PublicPosition
from jobrunner.run.decisions import each_step
from jobrunner.run.diff import compare_values, count_equal, digest_value, format_difference
from jobrunner.run.load import finish_load, load
from jobrunner.run.matching import Adaptation, Key
from jobrunner.run.resume import Begin, check_steps, prepare, with_streams
from jobrunner.texts import get_logger, printable
from jobrunner.worker import current_task, seed_calls
from jobrunner.workspace import Workspace

logger = get_logger(__name__)

Differences = dict[Key, list[dict[str, Any]]]
"""Node and blob -> its differences; none if it is equal."""

_REPLAYED = "replayed"  # under this, a workspace sets replayed values aside


@dataclass(frozen=True, slots=True)
class BlobDifference:
    """A blob whose replayed value differs from the recorded one.

    Attributes
    ----------
    node, blob : str
    how : tuple of dict
        The differences within it, as ``jobrunner diff`` shows them: ``where``, ``what``, and for
        numbers ``count``, ``size``, ``max_abs`` and ``max_rel``. A is the recorded value.
    tasks : tuple of str
        As ``node/task``: the first task that made other values when everything ran a second time
        from the same state; or, if the tasks that write the blob made the same values again, these.
        Empty if no task of the replay writes the blob.
    epoch : int or None
        The epoch in which they ran.
    is_repeatable : bool
        False: it is the first of these cases, so that task is the cause.
    """

    node: str
    blob: str
    how: tuple[Mapping[str, Any], ...]
    tasks: tuple[str, ...]
    epoch: int | None
    is_repeatable: bool

    def __str__(self) -> str:
        names = " and ".join(self.tasks)
        if not self.tasks:
            cause = "no task of the replay writes it"
        elif not self.is_repeatable:
            cause = (
                f"{names} in epoch {self.epoch} made another value when run twice with the same "
                f"inputs: it depends on something else, for example a clock, random numbers not "
                f"from current_task().rng, state of earlier calls, or the order of threads"
            )
        else:
            write = "writes it, and makes" if len(self.tasks) == 1 else "write it, and make"
            cause = (
                f"{names} in epoch {self.epoch} {write} the same value each time: its code or that "
                f"of a task before it, their libraries or their data outside the job have changed, "
                f"or one of them used state of earlier calls"
            )
        lines = [f"{self.node}/{self.blob}{d['where']}: {format_difference(d)}" for d in self.how]
        return printable("\n".join([*lines, f"  {cause}"]))


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of running a recorded epoch again.

    Attributes
    ----------
    epoch : int or Position
        The epoch that was run again and compared.
    step : int
        How many of its steps the record contains; 0: all.
    from_epoch : int, Position or None
        The recorded epoch from which the replay began; None: the init group.
    num_equal : int
        How many blobs are equal to the bit.
    differences : tuple of BlobDifference
    changes : tuple of str
        How the job differs from the recorded one.
    """

    epoch: PublicPosition
    step: int
    from_epoch: PublicPosition | None
    num_equal: int
    differences: tuple[BlobDifference, ...]
    changes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all blobs are equal to the bit."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"is_equal": self.is_equal, **with_json_positions(self)}

    def __str__(self) -> str:
        began = "the init group" if self.from_epoch is None else f"epoch {self.from_epoch}"
        subject = f"epoch {self.epoch}" + (f", up to step {self.step}" if self.step else "")
        lines = [f"{subject}, run again from {began}:"]
        lines += [str(difference) for difference in self.differences]
        lines.append(count_equal(self.num_equal, len(self.differences)))
        if self.changes:
            lines.append("changed since it was recorded:")
            lines += [f"  {change}" for change in self.changes]
        return printable("\n".join(lines))


class Replay:
    """Runs a recorded epoch again; see `JobRunner.replay`.

    Raises `CheckpointError` if the epoch is not recorded or does not fit the job.
    """

    def __init__(
        self,
        job: Job,
        directory: Directory,
        epoch: Position,
        *,
        adaptation: Adaptation | None = None,
        wait_seconds: float = 60,
        **deadlines: Any,  # see `Binding.run`
    ) -> None:
        self._job = job
        self._directory = directory
        self._adaptation = adaptation or Adaptation()
        self._wait_seconds = wait_seconds
        self._deadlines = deadlines
        plan = job.compile()
        snapshot = directory.snapshot()
        earlier = max((at for at in snapshot.epochs if at < epoch), default=None)
        self._target = self._prepare(plan, directory.record(epoch, snapshot))
        self._base: Begin | None = None
        if earlier is not None:
            self._base = self._prepare(plan, directory.record(earlier, snapshot))
        self._codecs = tuple(REGISTERED_CODECS.values())
        groups = {key: traced(group, self._codecs) for key, group in plan.groups.items()}
        plan = with_streams(plan, self._target.match.streams)
        self._plan = structs.replace(plan, groups={**groups, "resume": plan.groups["resume"]})
        before = directory.plan_of(self._target.record.run_number)
        self._changes = tuple(changes(before, describe(plan))) if before else ()

    def _prepare(self, plan: Plan, record: EpochRecord) -> Begin:
        check_steps(plan, record, self._directory.path)
        return prepare(self._job, plan, self._directory, record, self._adaptation)

    def check(self) -> None:
        """Verify the epochs to load; raises `CheckpointCorruptError`."""
        for begin in filter(None, (self._target, self._base)):
            verify_record(self._directory, begin.record)

    def run(self, session: Session) -> ReplayReport:
        """Run and compare; if a blob differs, run once more to find the cause."""
        self._session = session
        at = self._target.record.at
        with session.exclusive(f"The replay of job {self._plan.job!r}"):
            first = self._run_again()
            compared = self._compare()
            differences: list[BlobDifference] = []
            if any(compared.values()):
                logger.info("Epoch %s differs; running it once more", at)
                differences = self._explain(compared, first, self._run_again())
        return ReplayReport(
            at.public,
            at.step,
            None if self._base is None else self._base.record.epoch,
            len(compared) - len(differences),
            tuple(differences),
            self._changes,
        )

    def _run_again(self) -> Trace:
        """Run from the epoch recorded before this one, or from init, to the end of this one."""
        self._binding: Binding = self._session.bind(self._plan, wait_seconds=self._wait_seconds)
        trace: Trace = {}

        def run(key: str, epoch: int, step: int = 0) -> GroupResult:
            logger.info("Replay: %s group, epoch %d, step %d", key, epoch, step)
            result = self._run(key, epoch, step)
            trace.update(read_trace(self._plan.groups[key], result.metrics, epoch, step))
            return result

        begin = Position(0)
        if self._base is None:
            run("init", 0)
        else:
            begin = self._base.record.at
            self._load(self._base)
        end, first_step = self._target.record.at, begin.step
        for epoch in range(begin.epoch + 1, end.epoch + bool(end.step) + 1):
            for done, _, _ in each_step(self._plan, epoch, first_step, run):
                if epoch > end.epoch and done == end.step:
                    break
            first_step = 0
        return trace

    def _run(self, key: str, epoch: int, step: int = 0) -> GroupResult:
        return self._binding.run(key, epoch=epoch, step=step, **self._deadlines)

    def _load(self, begin: Begin) -> Begin:
        loaded = load(
            self._session, self._binding, self._job, self._directory, begin, self._adaptation
        )
        finish_load(self._binding, loaded, self._run)
        return loaded

    def _compare(self) -> Differences:
        at = self._target.record.at
        self._binding.apply(partial(_set_aside, self._plan.saved_blobs(at)))
        loaded = self._load(self._target)
        blobs: dict[str, set[str]] = {}
        for node, name in loaded.match.sources:
            blobs.setdefault(node, set()).add(name)
        for node, values in loaded.given.items():
            blobs.setdefault(node, set()).update(values)
        differences: Differences = {}
        for by_blob in self._binding.apply(partial(_compare, blobs, self._codecs)).values():
            differences.update(by_blob)
        return differences

    def _explain(self, compared: Differences, first: Trace, second: Trace) -> list[BlobDifference]:
        differing = [call for call in first if _differ(first[call], second.get(call, []))]
        writers = self._writers()
        differences = []
        for (node, blob), how in compared.items():
            if not how:
                continue
            calls = [call for call in first if call.task_key in writers[node, blob]]
            is_repeatable = not any(call in differing for call in calls)
            if not is_repeatable:
                calls = differing[:1]
            elif calls:
                calls = [call for call in calls if call.epoch == calls[-1].epoch]
            tasks = tuple(dict.fromkeys(f"{call.node}/{call.task}" for call in calls))
            epoch = calls[0].epoch if calls else None
            differences.append(BlobDifference(node, blob, tuple(how), tasks, epoch, is_repeatable))
        return differences

    def _writers(self) -> dict[Key, set[tuple[str, str, str]]]:
        """Node and blob -> the tasks that write it, each as in `Call.task_key`."""
        writers: dict[Key, set[tuple[str, str, str]]] = defaultdict(set)
        for group in self._plan.groups.values():
            for node, part in group.slices.items():
                for task in part.tasks:
                    names = [output.name for output in task.outputs if output.is_kept]
                    names += [update.name for update in _updates(task)]
                    for name in names:
                        writers[node, name].add((group.name, node, task.name))
        return writers


# ---- traces


class Call(NamedTuple):
    """A task in one run of its group."""

    group: str
    epoch: int
    step: int
    node: str
    task: str

    @property
    def task_key(self) -> tuple[str, str, str]:
        """Group, node and task."""
        return self.group, self.node, self.task


Trace = dict[Call, list[str]]
"""Digests of the values that each call made, in order of definition: for each instance of the task,
those of what it returned and updated; "" for one that cannot be digested."""

_PREFIX = "\0made "


def _updates(task: PlannedTask) -> list[UpdateArgument]:
    return [argument for argument in task.arguments if isinstance(argument, UpdateArgument)]


@dataclass(frozen=True, slots=True)
class Traced:
    """A task's function that also reports digests of the values it returns and updates."""

    task: PlannedTask
    codecs: Sequence[Codec]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        value = self.task.callee()(*args, **kwargs)
        num_parts = len(self.task.outputs)
        made = [value]
        if num_parts > 1:
            with suppress(Exception):  # the run raises if the value is no such sequence
                made = [value[part] for part in range(num_parts)]
        for place, argument in enumerate(self.task.arguments):
            if isinstance(argument, UpdateArgument):
                made.append(args[place])
        digests = []
        for part in made:
            try:
                digests.append(digest_value(part, self.codecs))
            except Exception:  # a socket, a model on a GPU, an array that another thread resizes
                digests.append("")
        task = current_task()
        name = json.dumps([task.node, task.name, task.instance])
        task.report(**{_PREFIX + name: " ".join(digests)})
        return value

    def seeded_within(self, _: Traced) -> Traced:
        """Seed the calls of the task's function, if they are, as in a run without a trace."""
        return Traced(structs.replace(self.task, fn=seed_calls(self.task.fn)), self.codecs)


def traced(group: GroupPlan, codecs: Sequence[Codec]) -> GroupPlan:
    """Trace every task of a group."""
    slices = {}
    for node, part in group.slices.items():
        tasks = [structs.replace(task, fn=Traced(task, codecs), places=()) for task in part.tasks]
        slices[node] = structs.replace(part, tasks=tuple(tasks))
    return structs.replace(group, slices=slices)


def read_trace(group: GroupPlan, metrics: Mapping[str, Metric], epoch: int, step: int) -> Trace:
    """Read the digests from a run's metrics."""
    digests: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(dict)
    for name, text in metrics.items():
        if name.startswith(_PREFIX):
            node, task_name, instance = json.loads(name.removeprefix(_PREFIX))
            digests[node, task_name][instance] = str(text).split(" ")
    planned = []
    for node, part in group.slices.items():
        planned += [(task.index, node, task.name) for task in part.tasks]
    trace = {}
    for _, node, task_name in sorted(planned):
        by_instance = digests.get((node, task_name), {})  # none if it was not due
        if by_instance:
            call = Call(group.name, epoch, step, node, task_name)
            trace[call] = [digest for i in sorted(by_instance) for digest in by_instance[i]]
    return trace


def _differ(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the digests show that a call made other values."""
    if len(one) != len(other):
        return True
    return any(a != b and a and b for a, b in zip(one, other, strict=True))


# ---- on the workers


def _set_aside(blobs: Mapping[str, Collection[str]], workspaces: Mapping[str, Workspace]) -> None:
    """Set replayed values aside before the recorded ones are loaded. Runs on each worker."""
    for node, workspace in workspaces.items():
        # A load replaces values; it never changes one in place.
        workspace.set_aside[_REPLAYED] = {
            name: workspace.value(name) for name in blobs.get(node, ()) if name in workspace.globals
        }


def _compare(
    blobs: Mapping[str, Collection[str]],
    codecs: Sequence[Codec],
    workspaces: Mapping[str, Workspace],
) -> Differences:
    """Compare the values set aside with the loaded ones. Runs on each worker."""
    differences: Differences = {}
    for node, workspace in workspaces.items():
        replayed = workspace.set_aside.pop(_REPLAYED)
        for name in sorted(blobs.get(node, ())):
            differences[node, name] = [{"where": "", "what": "only recorded"}]
            if name in replayed:
                recorded, value = workspace.value(name), replayed.pop(name)
                differences[node, name] = compare_values(recorded, value, codecs)
    return differences
