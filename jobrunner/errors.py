"""Every error that jobrunner raises on purpose, grouped by what a handler would do.

::

    JobRunnerError
    ├── DefinitionError (ValueError)         fix the job, name or argument
    ├── EndOfData                            begin the next pass: a reader has read all of this one
    ├── PlacementError                       start more workers, or change a node's requirements
    ├── ExecutionError                       a group of tasks did not finish
    │   ├── TaskFailedError                  fix the task's function, then run again
    │   ├── BlobNotFoundError (KeyError)     fix the blob's name, or run what makes it
    │   ├── NodeLostError                    run again: a worker died or hangs
    │   ├── SchedulerLostError               run again when a scheduler is back
    │   └── RunStoppedError                  run again to resume: a signal or a call stopped it
    └── CheckpointError                      a checkpoint could not be saved or loaded
        ├── CheckpointNotFoundError (FileNotFoundError)   name a recorded epoch
        ├── CheckpointCorruptError           resume from another epoch, or repair the directory
        ├── CheckpointWriteError             fix the storage: full, read-only or gone
        ├── CommitConflictError              stop: another run owns the directory
        └── PlanMismatchError                use the job that wrote it, or another checkpoint

A message says what happened, where, what was expected and found, and what to do next; as text, it is
`printable`. Every error survives pickling, so an error of a worker reaches the client with all its
attributes.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import ClassVar, Self

from jobrunner.texts import printable, shorten

_TWO_ENDS = re.compile(r"(?<=\w)\.\.(?= [A-Z]|$)")  # after the text of another error


class JobRunnerError(Exception):
    """Base class of every error that jobrunner raises on purpose.

    Attributes
    ----------
    advice : str
        The end of the message, if it says what to do and a caller may do it by itself.
    """

    advice: str = ""
    _kept: ClassVar[str] = "\n\t"

    def __post_init__(self, message: str) -> None:
        self.args = (message,)

    def __str__(self) -> str:
        # KeyError would print its repr, and OSError its errno.
        text = _TWO_ENDS.sub(".", str(self.args[0])) if self.args else ""
        return printable(shorten(text), self._kept)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def add_note(self, note: str) -> None:
        """Add a note to a traceback; see `BaseException.add_note`."""
        super().add_note(printable(note))

    def without_advice(self) -> str:
        """The message, without its `advice`."""
        return str(self).removesuffix(printable(self.advice)).rstrip()

    def advise(self, advice: str) -> Self:
        """End the message by this `advice`, in place of what it advised before."""
        self.args = (f"{self.without_advice()} {advice}",)
        self.advice = advice
        return self

    def __reduce__(self) -> tuple[object, ...]:
        args = (str(self), *self.args[1:]) if self.args else ()
        return (_rebuild, (type(self), args, self.__dict__))


class DefinitionError(JobRunnerError, ValueError):
    """Invalid job, name or argument. The caller's mistake, raised before anything runs."""


class EndOfData(JobRunnerError):  # noqa: N818 - an end, which callers expect
    """A reader has read all of its pass. ``for batch in reader`` begins the next."""


class PlacementError(JobRunnerError):
    """No worker of the cluster meets a node's `workers` and `resources`."""


class ExecutionError(JobRunnerError):
    """A group of tasks did not finish."""


@dataclass(eq=False, repr=False)
class TaskFailedError(ExecutionError):
    """A task's function raised.

    Parameters
    ----------
    message : str
    job, node, task : str
        Which task.
    group : str
        The task group that was running.
    epoch : int or None
        The epoch that was running; None outside a runner.
    remote_traceback : str
        The traceback, as the worker formatted it.
    """

    message: InitVar[str]
    _: KW_ONLY
    job: str = ""
    node: str = ""
    task: str = ""
    group: str = ""
    epoch: int | None = None
    remote_traceback: str = ""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this instead of a traceback, which would show the code of this library: the
        # notes have the frames of the task's own code.
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class BlobNotFoundError(ExecutionError, KeyError):
    """The workspace or checkpoint of a node has no blob of this name."""


@dataclass(eq=False, repr=False)
class NodeLostError(ExecutionError):
    """A worker with nodes of the job died, restarted or stopped responding.

    Parameters
    ----------
    message : str
    nodes : tuple of str
        The nodes whose workspaces are lost.
    worker : str
        Address of the worker.
    epoch : int or None
        The epoch that was running, if any.
    running : tuple of str
        The tasks that last ran on the worker, as ``node/task``.
    """

    message: InitVar[str]
    _: KW_ONLY
    nodes: tuple[str, ...] = ()
    worker: str = ""
    epoch: int | None = None
    running: tuple[str, ...] = ()


class SchedulerLostError(ExecutionError):
    """Dask's scheduler does not respond, or the client was closed."""


@dataclass(eq=False, repr=False)
class RunStoppedError(ExecutionError):
    """A signal or `JobRunner.stop` ended the run; the same command resumes it.

    Parameters
    ----------
    message : str
    reason : str
        ``"SIGINT"``, ``"SIGTERM"``, or the argument of `JobRunner.stop`.
    epoch : int or None
        The last epoch that ended.
    """

    message: InitVar[str]
    _: KW_ONLY
    reason: str = ""
    epoch: int | None = None

    def _render_traceback_(self) -> list[str]:
        # IPython shows this instead of a traceback: nothing in the code is at fault.
        return [f"{type(self).__name__}: {self.without_advice()}", self.advice]


class CheckpointError(JobRunnerError):
    """A checkpoint could not be saved, loaded or recorded."""

    _kept = ""  # one line: it may name what a stranger wrote


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The requested checkpoint does not exist."""


@dataclass(eq=False, repr=False)
class CheckpointCorruptError(CheckpointError):
    """A recorded checkpoint, or the log, differs from what was written.

    Parameters
    ----------
    message : str
    path : str
        The damaged file or directory.
    """

    message: InitVar[str]
    _: KW_ONLY
    path: str = ""


class CheckpointWriteError(CheckpointError):
    """Storage failed while a checkpoint was written. Earlier checkpoints are unharmed."""


class CommitConflictError(CheckpointError):
    """Another run uses the checkpoint directory, or has taken it over. This run must not write."""


class PlanMismatchError(CheckpointError):
    """The checkpoint lacks nodes or blobs that the job needs, so the run cannot resume from it."""


def _rebuild(
    cls: type[JobRunnerError], args: tuple[object, ...], state: dict[str, object]
) -> JobRunnerError:
    error = cls(*args)
    error.__dict__.update(state)
    return error
