"""What a binding asks of its workers, and how it reacts to their answers. Pure.

`exchange` decides, and sends nothing: it yields actions and takes in what came of them, times
included. `Messenger` carries the actions out.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from jobrunner.cluster.members import Members
from jobrunner.errors import (
    BlobNotFoundError,
    DefinitionError,
    ExecutionError,
    TaskFailedError,
)
from jobrunner.worker import Failure, Message

FIRST_WAIT_SECONDS = 0.25
"""How long workers may hold back the answer to a first message.

It occupies one of the scheduler's connections meanwhile. With more workers than connections, the
others get theirs only then, and tasks of the first workers may be waiting for theirs.
"""
POLL_SECONDS = 2.0
TOLD_SECONDS = 60.0
"""When a log message first names the workers that are late."""
NEWS_SECONDS = 0.5
"""How long to wait for the scheduler's word on a worker whose answer was an error."""
LOSS_SECONDS = 2.0
"""How long to wait for the scheduler's word on a worker that another one could not reach."""

Answer = Message | BaseException


@dataclass(slots=True)
class Request:
    """What workers are asked to do.

    Attributes
    ----------
    call : str
        Name of the worker's method.
    details : dict
        Its arguments, sent with the first message only.
    per_worker : dict of str to dict
        Further arguments, by address.
    channel : str
        Requests of one call run at the same time on different channels, else one by one.
    number : int or None
        Of the operation that it starts; sent again, the same number counts once. None: a query,
        which workers answer at once.
    deadline_seconds, task_deadline_seconds : float or None
        For the whole operation, and for each task that runs in it.
    group, what : str
        What errors call it: a group's name, or what else it does.
    epoch : int or None
        For errors.
    is_careful : bool
        Workers answer before each task begins, and wait for the next message.
    """

    call: str
    details: dict[str, Any] = field(default_factory=dict)
    per_worker: dict[str, dict[str, Any]] = field(default_factory=dict)
    channel: str = ""
    number: int | None = None
    deadline_seconds: float | None = None
    task_deadline_seconds: float | None = None
    group: str = ""
    what: str = ""
    epoch: int | None = None
    is_careful: bool = False

    def poll(self, wait_seconds: float) -> Message:
        """The message that asks how far the operation is."""
        if self.number is None:
            return {"call": self.call}
        message = {"call": self.call, "number": self.number, "wait_seconds": wait_seconds}
        return {**message, "channel": self.channel} if self.channel else message

    def begin(self, addresses: Sequence[str], wait_seconds: float) -> list[Batch]:
        """The messages that start the operation, with the workers that each is for."""
        first = {**self.poll(wait_seconds), **self.details}
        if self.per_worker:
            return [({**first, **self.per_worker[a]}, [a]) for a in addresses]
        return [(first, addresses)] if addresses else []

    def check(self, replies: Mapping[str, Message], job: str) -> None:
        """Raise the error that workers report, if any."""
        for reply in replies.values():
            if reply["status"] == "failed":
                epoch = reply.get("epoch", self.epoch)
                raise self._failed(Failure(**reply["failure"]), job, epoch)
        for address, reply in replies.items():
            if reply["status"] != "done":
                reason = reply.get("reason") or f"it answered {reply['status']!r}"
                raise ExecutionError(
                    f"Worker {address} did not finish its part of {self.call} {self.group}: "
                    f"{reason}. Start the job again."
                )

    def late(self, nodes: Sequence[str], running: Sequence[str]) -> ExecutionError:
        """The error for a deadline that passed while the workers of `nodes` were busy."""
        what = self.what or f"the {self.group} group"
        return ExecutionError(
            f"{what[0].upper()}{what[1:]} did not end within {self.deadline_seconds:g} s"
            f"{_at(self.epoch)}. Still waiting for {', '.join(map(repr, nodes))} (running: "
            f"{', '.join(running) or 'nothing'}). Check what blocks them, or allow more time."
        )

    def overlong(self, task: str, worker: str | None) -> ExecutionError:
        """The error for a task whose deadline passed."""
        return ExecutionError(
            f"Task {task} of the {self.group} group did not end within "
            f"{self.task_deadline_seconds:g} s{_at(self.epoch)}, on worker {worker}. Check what "
            f"blocks it, or allow more time."
        )

    def _failed(self, failure: Failure, job: str, epoch: int | None) -> BaseException:
        cause = failure.exception()
        if failure.is_own:
            error = cause
            is_ours = not failure.traceback and isinstance(
                error, DefinitionError | BlobNotFoundError
            )
            if failure.node and is_ours:
                error.args = (f"Job {job!r}, group {self.group!r}{_at(epoch)}: {error}",)
        else:
            where = f"node {failure.node!r}, group {self.group!r}, job {job!r}"
            hint = "The remote traceback shows where; fix" if failure.traceback else "Fix"
            error = TaskFailedError(
                f"Task {failure.task!r} ({where}) failed{_at(epoch)}: "
                f"{failure.summary.rstrip('.')}. {hint} the task and start the same command again.",
                job=job,
                node=failure.node,
                task=failure.task,
                group=self.group,
                epoch=epoch,
                remote_traceback=failure.traceback,
            )
            error.__cause__ = cause
        if failure.traceback:
            error.add_note(f"On the worker:\n{failure.traceback}")
        return error


def _at(epoch: int | None) -> str:
    return "" if epoch is None else f" at epoch {epoch}"


def pickle_function(fn: Any, what: str) -> bytes:
    """Pickle a function for the workers.

    Raises
    ------
    DefinitionError
        It cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(fn))
    except Exception as error:
        raise DefinitionError(
            f"{what} cannot be pickled, so no worker can run it: {type(error).__name__}: {error}. "
            f"Open files, sockets, locks and models on a GPU inside of it."
        ) from error


# ---- the exchange

Batch = tuple[Message, Sequence[str]]
"""A message, and the workers that get it."""


class Ask(NamedTuple):
    """Send messages, and collect the answers, which take at most `wait_seconds` by intent."""

    batches: list[Batch]
    wait_seconds: float

    @property
    def addresses(self) -> list[str]:
        """All workers that are asked."""
        return [address for _, addresses in self.batches for address in addresses]


class Abort(NamedTuple):
    """Tell workers to start nothing more of the current run."""

    addresses: Collection[str]
    reason: str


class AwaitNews(NamedTuple):
    """Wait until a worker is known to be lost, or `leaving` to be about to leave."""

    seconds: float
    leaving: str = ""


class Warn(NamedTuple):
    """Log a warning."""

    text: str


class Heard(NamedTuple):
    """What came of an action.

    Attributes
    ----------
    now : float
        The time, in seconds.
    answers : mapping of str to Answer
        To `Ask`, by address; a worker that does not answer in time counts as running, and none
        is listed where one is lost.
    lost : mapping of str to str
        Address -> how we know, for workers found to be lost meanwhile.
    """

    now: float
    answers: Mapping[str, Answer] = {}
    lost: Mapping[str, str] = {}


Action = Ask | Abort | AwaitNews | Warn


def exchange(
    request: Request, addresses: Sequence[str], members: Members, now: float
) -> Generator[Action, Heard, dict[str, Message]]:
    """Ask workers for something, poll until each has replied, and notice which are lost.

    Parameters
    ----------
    request : Request
    addresses : sequence of str
    members : Members
        Learns here what runs where and who is lost; others may add losses at any time.
    now : float
        The time, in seconds.

    Yields
    ------
    Action
        To carry out; send what came of it.

    Returns
    -------
    dict
        Address -> reply, in the order of `addresses`.

    Raises
    ------
    NodeLostError
        A worker is lost: the scheduler removed it, it stays silent, its answer is an error, or
        it restarted.
    ExecutionError
        A deadline passed.
    """
    is_run = request.call == "run"
    started, told_seconds, wait_seconds = now, TOLD_SECONDS, FIRST_WAIT_SECONDS
    since: dict[tuple[str, str], float] = {}  # task -> when a worker first reported it
    asked: Sequence[str] = list(addresses)
    unheard = set(addresses)  # they may not have heard the first message
    replies: dict[str, Message] = {}
    is_failed = False
    while True:
        batches = request.begin([a for a in asked if a in unheard], wait_seconds)
        if to_poll := [a for a in asked if a not in unheard]:
            batches.append((request.poll(wait_seconds), to_poll))
        heard = yield Ask(batches, wait_seconds)
        messages = yield from _messages(heard, members, request.epoch)
        unheard.clear()
        for address, message in messages.items():
            if message is None:
                unheard.add(address)
            elif message["status"] == "running" and request.number is not None:
                if is_run:
                    members.running[address] = message["tasks"]
            else:
                if is_run:
                    members.running.pop(address, None)
                replies[address] = message
                if "suspect" in message:
                    yield AwaitNews(LOSS_SECONDS)
                    if not members.lost:
                        members.lost[message["suspect"]] = message["reason"]
                        members.cut.add(message["suspect"])
                    yield from _give_up(members, request.epoch)
        pending = [address for address in addresses if address not in replies]
        if not pending:
            return {address: replies[address] for address in addresses}
        if not is_failed and any(reply["status"] != "done" for reply in replies.values()):
            is_failed = True
            if is_run:  # anything else has nothing to do with a run meanwhile
                heard = yield Abort(pending, "another worker's part has failed")
        # A worker's part is done before others have its values, and sending these may still fail.
        asked = addresses if is_run and not is_failed else pending
        wait_seconds = POLL_SECONDS
        now = heard.now
        if request.what and now - started > told_seconds:
            told_seconds *= 2
            late = ", ".join(map(repr, members.nodes_on(pending)))
            what = request.what.capitalize()
            yield Warn(f"{what} has taken {now - started:.0f} s. Still waiting for {late}.")
        if request.deadline_seconds is not None:
            left = request.deadline_seconds - (now - started)
            if left <= 0:
                raise request.late(members.nodes_on(pending), members.running_on(pending))
            wait_seconds = min(wait_seconds, left)
        if request.task_deadline_seconds is not None:
            running = [task for a in pending for task in members.running.get(a, ())]
            since = {task: since.get(task, now) for task in running}
            left = min(since.values(), default=now) + request.task_deadline_seconds - now
            if left <= 0:
                node, name = min(since, key=since.__getitem__)
                raise request.overlong(f"{node}/{name}", members.placement.get(node))
            wait_seconds = min(wait_seconds, max(left, 0.01))


def _messages(
    heard: Heard, members: Members, epoch: int | None
) -> Generator[Action, Heard, dict[str, Message | None]]:
    """The messages among the answers; None for a worker to be asked again."""
    for address, how in heard.lost.items():
        members.lost.setdefault(address, how)
    messages: dict[str, Message | None] = {}
    for address, answer in heard.answers.items():
        if isinstance(answer, BaseException):
            # The scheduler disconnects a worker that leaves, once; the worker still serves.
            may_leave = address not in members.excused
            members.excused.add(address)
            if may_leave and address not in members.leaving and not members.lost:
                yield AwaitNews(NEWS_SECONDS, address)
            if not may_leave or address not in members.leaving:
                members.lost.setdefault(address, f"{type(answer).__name__}: {answer}")
            messages[address] = None
        elif not isinstance(answer, Mapping) or answer.get("status") == "unknown":
            members.lost.setdefault(address, "it restarted and lost this session's state")
        else:
            messages[address] = answer
    if members.lost:
        yield from _give_up(members, epoch)
    return messages


def _give_up(members: Members, epoch: int | None) -> Generator[Action, Heard, NoReturn]:
    """Tell the other workers, and raise; meanwhile further losses may become known."""
    first = next(iter(members.lost))
    yield Abort(members.alive, f"worker {first} is lost")
    raise members.error(epoch)
