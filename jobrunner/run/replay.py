"""Run a recorded epoch again from the one before it, and compare the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from jobrunner.checkpoint import REGISTERED_CODECS, Codec, Directory, EpochRecord, verify_record
from jobrunner.cluster import Binding, GroupResult, Session
from jobrunner.compile import UpdateArgument
from jobrunner.define import Job
from jobrunner.json_output import to_json
from jobrunner.names import BlobKey
from jobrunner.positions import Position, PublicPosition
from jobrunner.run.decisions import each_step
from jobrunner.run.diff import compare_values, count_equal
from jobrunner.run.load import finish_load, load
from jobrunner.run.matching import Adaptation
from jobrunner.run.resume import Begin, changes_since, check_steps, prepare, with_streams
from jobrunner.texts import get_logger, printable
from jobrunner.workspace import Workspace

logger = get_logger(__name__)

Differences = dict[BlobKey, list[dict[str, Any]]]
"""Node and blob -> its differences; none if it is equal."""

_REPLAYED = "replayed"  # under this, a workspace parks replayed values


@dataclass(frozen=True, slots=True)
class BlobDifference:
    """A blob whose replayed value differs from the recorded one.

    Attributes
    ----------
    node, blob : str
    how : tuple of dict
        The differences within it, as ``jobrunner diff`` shows them: ``where``, ``what``, and for
        numbers ``max_abs``. A is the recorded value.
    tasks : tuple of str
        Those that write the blob, as ``node/task``; empty if no task of the replay does.
    """

    node: str
    blob: str
    how: tuple[Mapping[str, Any], ...]
    tasks: tuple[str, ...]

    def __str__(self) -> str:
        writers = " and ".join(self.tasks) or "no task of the replay"
        lines = [f"{self.node}/{self.blob}{d['where']}: {d['what']}" for d in self.how]
        return printable("\n".join([*lines, f"  written by {writers}"]))


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
        In the order in which tasks of an epoch write the blobs.
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
        return {"is_equal": self.is_equal, **to_json(self)}

    def __str__(self) -> str:
        subject, began = f"epoch {self.epoch}", "the init group"
        if self.step:
            subject += f", up to step {self.step}"
        if self.from_epoch is not None:
            began = f"epoch {self.from_epoch}"
        lines = [f"{subject}, run again from {began}:"]
        lines += [str(difference) for difference in self.differences]
        lines.append(count_equal(self.num_equal, len(self.differences)))
        if self.differences:
            lines.append(
                "The cause is a task that writes the first of them, or one before it: it depends on "
                "more than its inputs (a clock, random numbers not from current_task().rng, state of "
                "earlier calls, the order of threads), or its code, library or data has changed."
            )
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
        self._plan = job.compile()
        snapshot = directory.snapshot()
        earlier = max((at for at in snapshot.epochs if at < epoch), default=None)
        self._target = self._prepare(directory.record(epoch, snapshot))
        self._base: Begin | None = None
        if earlier is not None:
            self._base = self._prepare(directory.record(earlier, snapshot))
        self._plan = with_streams(self._plan, self._target.match.streams)
        self._binding: Binding

    def _prepare(self, record: EpochRecord) -> Begin:
        check_steps(self._plan, record, self._directory.path)
        return prepare(self._job, self._plan, self._directory, record, self._adaptation)

    def check(self) -> None:
        """Verify the epochs to load; raises `CheckpointCorruptError`."""
        for begin in filter(None, (self._target, self._base)):
            verify_record(self._directory, begin.record)

    def run(self, session: Session) -> ReplayReport:
        """Run and compare."""
        target = self._target.record
        with session.exclusive(f"The replay of job {self._plan.job!r}"):
            first = self._plan.groups["init"] if self._base is None else self._base.reloads
            self._binding = session.bind(self._plan, wait_seconds=self._wait_seconds, first=first)
            self._run_again(session)
            compared = self._compare(session)
        writers = self._writers()
        differences = []
        for key in dict.fromkeys((*writers, *compared)):
            if compared.get(key):
                tasks = tuple(writers.get(key, ()))
                differences.append(BlobDifference(*key, tuple(compared[key]), tasks))
        return ReplayReport(
            target.at.public,
            target.at.step,
            None if self._base is None else self._base.record.epoch,
            len(compared) - len(differences),
            tuple(differences),
            changes_since(self._directory, target, self._plan),
        )

    def _run_again(self, session: Session) -> None:
        """Run from the epoch recorded before this one, or from init, to the end of this one."""
        begin = Position(0)
        if self._base is None:
            self._run("init", 0)
        else:
            begin = self._base.record.at
            self._load(session, self._base)
        end, first_step = self._target.record.at, begin.step
        for epoch in range(begin.epoch + 1, end.epoch + bool(end.step) + 1):
            for done, _, _ in each_step(self._plan, epoch, first_step, self._run):
                if epoch > end.epoch and done == end.step:
                    break
            first_step = 0

    def _run(self, group: str, epoch: int, step: int = 0) -> GroupResult:
        logger.info("Replay: %s group, epoch %d, step %d", group, epoch, step)
        return self._binding.run(group, epoch=epoch, step=step, **self._deadlines)

    def _load(self, session: Session, begin: Begin) -> None:
        load(session, self._binding, self._directory, begin)
        finish_load(self._binding, begin, self._run)

    def _compare(self, session: Session) -> Differences:
        at = self._target.record.at
        self._binding.apply(partial(_park_replayed, self._plan.saved_blobs(at)))
        self._load(session, self._target)
        blobs: dict[str, set[str]] = {}
        for node, name in self._target.match.sources:
            blobs.setdefault(node, set()).add(name)
        differences: Differences = {}
        compare = partial(_compare, blobs, tuple(REGISTERED_CODECS.values()))
        for by_blob in self._binding.apply(compare).values():
            differences.update(by_blob)
        return differences

    def _writers(self) -> dict[BlobKey, list[str]]:
        """Node and blob -> the tasks that write it; both in the order of tasks."""
        groups = ["epoch", "epoch_end"]
        if self._target.record.at == Position(0):
            groups = ["init"]
        writers: dict[BlobKey, list[str]] = {}
        for key in groups:
            if key not in self._plan.groups:
                continue
            planned = []
            for node, part in self._plan.groups[key].slices.items():
                planned += [(task.index, node, task) for task in part.tasks]
            for _, node, task in sorted(planned, key=itemgetter(0)):
                names = [output.name for output in task.outputs if output.is_kept]
                names += [a.name for a in task.arguments if isinstance(a, UpdateArgument)]
                for name in names:
                    writers.setdefault((node, name), []).append(f"{node}/{task.name}")
        return writers


# ---- on the workers


def _park_replayed(
    blobs: Mapping[str, Collection[str]], workspaces: Mapping[str, Workspace]
) -> None:
    """Keep replayed values before the recorded ones are loaded. Runs on each worker."""
    for node, workspace in workspaces.items():
        # A load replaces values; it never changes one in place.
        names = workspace.globals.keys() & blobs.get(node, ())
        workspace.parked[_REPLAYED] = {name: workspace.value(name) for name in names}


def _compare(
    blobs: Mapping[str, Collection[str]],
    codecs: Sequence[Codec],
    workspaces: Mapping[str, Workspace],
) -> Differences:
    """Compare the replayed values with the loaded ones. Runs on each worker."""
    differences: Differences = {}
    for node, workspace in workspaces.items():
        replayed = workspace.parked.pop(_REPLAYED)
        for name in sorted(blobs.get(node, ())):
            differences[node, name] = [{"where": "", "what": "only recorded"}]
            if name in replayed:
                recorded, value = workspace.value(name), replayed.pop(name)
                differences[node, name] = compare_values(recorded, value, codecs)
    return differences
