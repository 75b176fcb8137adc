"""Everything jobrunner raises on purpose, as one tree.

::

    JobRunnerError
    ├── DefinitionError (ValueError)          the job's author: mend the definition
    ├── PlacementError                        the cluster: other workers are needed
    ├── ExecutionError                        while a group of tasks ran
    │   ├── TaskFailedError                   a task raised
    │   ├── NodeLostError                     the worker of a node is gone or silent
    │   ├── SchedulerLostError                Dask's scheduler is gone
    │   ├── RunStoppedError                   a run was told to stop, and can be resumed
    │   └── BlobNotFoundError (KeyError)      a workspace or checkpoint has no such blob
    └── CheckpointError                       while state was saved or loaded
        ├── CheckpointNotFoundError (FileNotFoundError)   nothing recorded under that name
        ├── CheckpointCorruptError            recorded, but not what was written
        ├── CheckpointWriteError              could not be made durable
        ├── CommitConflictError               another run has taken the directory over
        └── PlanMismatchError                 the checkpoint cannot fill this job

Every message says what happened, where, what was expected against what was found, and what to do
next. All errors survive pickling, so that what a worker raises reaches the client whole.
"""

from __future__ import annotations


class JobRunnerError(Exception):
    """Base of every error that jobrunner raises on purpose."""

    def __str__(self) -> str:
        # KeyError and OSError print themselves in ways of their own; a message is a message.
        return str(self.args[0]) if self.args else ""


class DefinitionError(JobRunnerError, ValueError):
    """The job, a name or an argument cannot be what it says; raised before anything runs."""


class PlacementError(JobRunnerError):
    """The cluster has no workers that a node may run on."""


class ExecutionError(JobRunnerError):
    """Running a group of tasks did not succeed."""


class TaskFailedError(ExecutionError):
    """A task's function raised.

    Parameters
    ----------
    message : str
    job, node, task : str
        Where it was raised.
    group : str
        Name of the task group that was running.
    epoch : int or None
        The epoch that was running; None outside a runner.
    remote_traceback : str
        The traceback as the worker formatted it.
    """

    def __init__(
        self,
        message: str,
        *,
        job: str = "",
        node: str = "",
        task: str = "",
        group: str = "",
        epoch: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.job = job
        self.node = node
        self.task = task
        self.group = group
        self.epoch = epoch
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


class NodeLostError(ExecutionError):
    """A worker that holds nodes died, was replaced, or stopped answering.

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
        The tasks that ran on the worker when it was last heard, as ``node/task``.
    """

    def __init__(
        self,
        message: str,
        *,
        nodes: tuple[str, ...] = (),
        worker: str = "",
        epoch: int | None = None,
        running: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.nodes = nodes
        self.worker = worker
        self.epoch = epoch
        self.running = running

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


class SchedulerLostError(ExecutionError):
    """Dask's scheduler cannot be reached any more, or the client of it was closed."""


class RunStoppedError(ExecutionError):
    """A run was told to stop; the same command goes on from the last recorded epoch.

    Parameters
    ----------
    message : str
    reason : str
        Who told it: ``"SIGINT"``, ``"SIGTERM"``, or what was given to `JobRunner.stop`.
    epoch : int or None
        The last epoch that ended.
    """

    def __init__(self, message: str, *, reason: str = "", epoch: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.epoch = epoch

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


class BlobNotFoundError(ExecutionError, KeyError):
    """A blob was asked for that the node's workspace or checkpoint does not hold."""


class CheckpointError(JobRunnerError):
    """Saving, loading or recording state did not succeed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No recorded checkpoint answers to what was asked for."""


class CheckpointCorruptError(CheckpointError):
    """A recorded checkpoint is not, byte for byte, what was written.

    Parameters
    ----------
    message : str
    path : str
        The file or directory in question.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written and made durable; what was recorded before still is."""


class CommitConflictError(CheckpointError):
    """Another run holds, or has taken over, the checkpoint directory; this one must not write."""


class PlanMismatchError(CheckpointError):
    """The checkpoint lacks nodes or blobs that the job needs, so it cannot be resumed from."""


def _rebuild(
    cls: type[JobRunnerError], args: tuple[object, ...], state: dict[str, object]
) -> JobRunnerError:
    error = cls(*args)
    error.__dict__.update(state)
    return error
