"""Run a recorded epoch again from the one before it, and compare the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from jobrunner.checkpoint import REGISTERED_CODECS, Codec, Loader
from jobrunner.cluster import Binding, GroupResult, Session
from jobrunner.compile import changes, describe
from jobrunner.define import Job
from jobrunner.json_output import with_json_positions
from jobrunner.positions import Position, PublicPosition
from jobrunner.run.decisions import each_step
from jobrunner.run.load import Loaded, check_steps, finish_load, load, rebuild
from jobrunner.run.matching import Adaptation, match
from jobrunner.run.replay.compare import compare_bits, count_equal, format_difference
from jobrunner.run.replay.tracing import Call, Dataflow, Trace, read_trace, traced
from jobrunner.texts import get_logger, printable
from jobrunner.workspace import Workspace

logger = get_logger(__name__)

Found = dict[tuple[str, str], list[dict[str, Any]]]
"""(node, blob) -> its differences; none if it is equal."""

_REPLAYED = "replayed"  # the companion of a workspace in which replayed values wait


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
        The tasks, as ``node/task``, one of which first made a different value; usually only one.
        Empty if no task of the replay writes the blob.
    epoch : int or None
        The epoch in which they ran.
    is_repeatable : bool
        Whether those tasks made the same values when they ran twice from the same state. False:
        they made different values from the same inputs, so they are the cause.
    """

    node: str
    blob: str
    how: tuple[Mapping[str, Any], ...]
    tasks: tuple[str, ...]
    epoch: int | None
    is_repeatable: bool

    def __str__(self) -> str:
        if not self.tasks:
            why = "no task of the replay writes it"
        elif not self.is_repeatable:
            why = (
                f"{' and '.join(self.tasks)} in epoch {self.epoch} made another value when run twice "
                f"with the same inputs: it depends on something else, for example a clock, random "
                f"numbers not from current_task().rng, state of earlier calls, or the order of "
                f"threads"
            )
        elif len(self.tasks) == 1:
            why = (
                f"{self.tasks[0]} in epoch {self.epoch} is the first to differ, and makes the same "
                f"value each time: its code, its libraries or its data outside the job have "
                f"changed, or it used state of earlier calls"
            )
        else:
            why = f"the first to differ is one of {', '.join(self.tasks)} in epoch {self.epoch}"
        lines = [f"{self.node}/{self.blob}{d['where']}: {format_difference(d)}" for d in self.how]
        return printable("\n".join([*lines, f"  {why}"]))


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
        what = f"epoch {self.epoch}" + (f", up to step {self.step}" if self.step else "")
        lines = [f"{what}, run again from {began}:"]
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
        manager: Loader,
        epoch: Position,
        *,
        adaptation: Adaptation | None = None,
        wait_seconds: float = 60,
        **deadlines: Any,  # see `Binding.run`
    ) -> None:
        self._job = job
        self._manager = manager
        self._epoch = epoch
        self._adaptation = adaptation = adaptation or Adaptation()
        self._wait_seconds = wait_seconds
        self._deadlines = deadlines
        plan = job.compile()
        earlier = [at for at in manager.directory.all() if at < epoch]
        self._from = max(earlier, default=None)
        self._needed = [epoch] if self._from is None else [epoch, self._from]
        for needed in self._needed:
            record = manager.directory.record(needed)
            check_steps(plan, record, manager.path)
            found = match(plan, manager, record, adaptation)
            rebuild(job, plan, manager, needed, found, {})
        self._codecs = tuple(REGISTERED_CODECS.values())
        groups = {key: traced(group, self._codecs) for key, group in plan.groups.items()}
        self._plan = structs.replace(plan, groups=groups)
        then = manager.directory.run_plan(epoch)
        self._changes = tuple(changes(then, describe(plan))) if then else ()

    def check(self) -> None:
        """Verify the epochs to load; raises `CheckpointCorruptError`."""
        for epoch in self._needed:
            self._manager.verify(epoch)

    def run(self, session: Session) -> ReplayReport:
        """Run and compare; if a blob differs, run once more to find the cause."""
        self._session = session
        with session.exclusive(f"The replay of job {self._plan.job!r}"):
            trace, flow = self._run_again()
            found = self._compare()
            differences: list[BlobDifference] = []
            if any(found.values()):
                logger.info("Epoch %s differs; running it once more", self._epoch)
                second, _ = self._run_again()
                differences = self._explain(found, flow, trace, second)
        return ReplayReport(
            self._epoch.public,
            self._epoch.step,
            None if self._from is None else self._from.public,
            len(found) - len(differences),
            tuple(differences),
            self._changes,
        )

    def _run_again(self) -> tuple[Trace, Dataflow]:
        """Run from the epoch recorded before this one, or from init, to the end of this one."""
        self._binding: Binding = self._session.bind(self._plan, wait_seconds=self._wait_seconds)
        trace, flow, groups = Trace(), Dataflow(), dict(self._plan.groups)

        def run(group: str, epoch: int, step: int = 0) -> GroupResult:
            logger.info("Replay: %s group, epoch %d, step %d", group, epoch, step)
            result = self._run(group, epoch, step)
            trace.update(read_trace(result.metrics, groups[group].name, epoch, step))
            flow.add_run(groups[group], groups[group].name, epoch, step)
            return result

        if self._from is None:
            run("init", 0)
        else:
            loaded = self._load(self._from)
            groups["resume"] = loaded.resume_group
            finish_load(self._binding, loaded, run)
            for node, names in loaded.waiting.items():
                for name in names:  # no run made the state that was loaded into this object
                    flow.blobs.pop((node, name), None)
        begin, end = self._from or Position(0), self._epoch
        start = begin.step
        for epoch in range(begin.epoch + 1, end.epoch + bool(end.step) + 1):
            for done, _, _ in each_step(self._plan, epoch, start, run):
                if epoch > end.epoch and done == end.step:
                    break
            start = 0
        return trace, flow

    def _run(self, group: str, epoch: int, step: int = 0) -> GroupResult:
        return self._binding.run(group, epoch=epoch, step=step, **self._deadlines)

    def _load(self, epoch: Position) -> Loaded:
        manager, adaptation = self._manager, self._adaptation
        loaded = load(self._session, self._binding, self._job, manager, epoch, adaptation)
        if loaded.waiting or loaded.match.made:
            loaded = replace(loaded, resume_group=traced(loaded.resume_group, self._codecs))
        return loaded

    def _compare(self) -> Found:
        self._binding.apply(partial(_set_aside, self._plan.saved_blobs(self._epoch)))
        loaded = self._load(self._epoch)
        blobs = loaded.blobs
        if loaded.waiting:
            finish_load(self._binding, loaded, self._run)
        compare = partial(_compare, blobs, self._codecs)
        found: Found = {}
        for by_blob in self._binding.apply(compare).values():
            found.update(by_blob)
        return found

    def _explain(
        self, found: Found, flow: Dataflow, trace: Trace, second: Trace
    ) -> list[BlobDifference]:
        last = {blob: flow.blobs[blob] for blob in found if blob in flow.blobs}
        equal = {value for blob, value in last.items() if not found[blob]}
        other = {value for blob, value in last.items() if found[blob]}
        unrepeatable = flow.unrepeatable(trace, second)
        differences = []
        for (node, blob), how in found.items():
            if not how:
                continue
            calls: list[Call] = []  # that may be the first to differ
            causes: list[Call] = []
            if (value := last.get((node, blob))) is not None:
                makers = {value.call, *(made.call for made in flow.made_of(value))}
                causes = [call for call in unrepeatable if call in makers]
                calls = causes or flow.suspects(value, equal, other)
            tasks = tuple(dict.fromkeys(call.name for call in calls))
            epoch = calls[0].epoch if calls else None
            differences.append(BlobDifference(node, blob, tuple(how), tasks, epoch, not causes))
        return differences


def _set_aside(blobs: Mapping[str, frozenset[str]], workspaces: Mapping[str, Workspace]) -> None:
    """Set replayed values aside before the recorded ones are loaded. Runs on each worker."""
    for node, workspace in workspaces.items():
        # A load replaces values; it never changes one in place.
        workspace.set_aside[_REPLAYED] = {
            name: workspace.value(name) for name in blobs.get(node, ()) if name in workspace.globals
        }


def _compare(
    blobs: Mapping[str, frozenset[str]],
    codecs: Sequence[Codec],
    workspaces: Mapping[str, Workspace],
) -> Found:
    """Compare the values set aside with the loaded ones. Runs on each worker."""
    found: Found = {}
    for node, workspace in workspaces.items():
        replayed = workspace.set_aside.pop(_REPLAYED)
        for name in sorted(blobs.get(node, ())):
            if name in replayed:
                recorded, made = workspace.value(name), replayed.pop(name)
                found[node, name] = list(compare_bits(node, name, recorded, made, codecs))
            else:
                found[node, name] = [{"where": "", "what": "only recorded"}]
    return found
