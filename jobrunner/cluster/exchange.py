"""A binding's workers, its requests to them, and when one of them is lost. Pure.

`exchange` decides but sends nothing: it yields actions and takes their results, times included.
`Messenger` carries the actions out. The first loss ends a request. A worker is lost when

| what happens | who notices | after |
|---|---|---|
| its process dies | the scheduler, whose news `dask_internals.py: read_news` reads | milliseconds |
| another worker took its address, or it dropped the binding | it answers "unknown" | one message |
| its lease was cancelled | `Messenger`, by the status of Dask's future | one message |
| Dask could not send it a message | `exchange`, unless the scheduler soon says that it retires | `NEWS_SECONDS` |
| it does not answer, and then no ping either | `Messenger`, `SchedulerLink.find_silent` | worker-silence-seconds, `PING_SECONDS` |
| it retires, and answers no message and then no ping | `Messenger` | `RETIRING_SECONDS`, `PING_SECONDS` |
| another worker cannot send it values, or a ping | `worker/outbox.py`; `worker/hosted_nodes.py` names it as a suspect | worker-silence-seconds, `PING_SECONDS`, `LOSS_SECONDS` |

`PING_SECONDS` is in `worker/outbox.py`, worker-silence-seconds in `jobrunner.yaml`, the others are below.
Before a worker that did not answer a message counts as lost, the scheduler must answer a ping: else the
scheduler is lost. Only time in which the client's own event loop ran counts as silence.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jobrunner.cluster.placement import WorkerInfo
from jobrunner.cluster.source_lines import with_source_lines
from jobrunner.errors import (
    BlobNotFoundError,
    DefinitionError,
    ExecutionError,
    NodeLostError,
    TaskFailedError,
)
from jobrunner.texts import get_logger, listed
from jobrunner.worker import EndedRun, Failure, Frames, Message
from jobrunner.workspace import dumps_definitions

logger = get_logger(__name__)

FIRST_WAIT_SECONDS = 0.25
"""How long workers may delay the answer to a first message.

Until then the message occupies one of the scheduler's connections. With fewer connections than
workers, some workers get their message only afterwards, and others' tasks may wait for them.
"""
POLL_SECONDS = 2.0
WARN_SECONDS = 60.0
"""After this time a warning names the workers that are late."""
NEWS_SECONDS = 0.5
"""How long to wait for news from the scheduler of a worker whose answer was an error."""
LOSS_SECONDS = 2.0
"""How long to wait for news from the scheduler of a worker that another one could not reach."""

RETIRING_SECONDS = 3.0
"""How much later than requested a worker that is about to leave may answer, until it must answer a ping.
Dask takes half a minute to give up the connection to one that is gone."""

Answer = Message | BaseException


@dataclass(slots=True)
class Member:
    """A worker in use by a binding."""

    info: WorkerInfo
    incarnation: str
    leases: list[Any] = field(default_factory=list)  # futures of Dask


class Members:
    """The workers that one binding uses, by address."""

    def __init__(self, placement: Mapping[str, str]) -> None:
        self.placement = placement  # node -> address; the binding adds to it
        self.workers: dict[str, Member] = {}
        self.lost: dict[str, str] = {}  # causes
        # Lost workers that the scheduler still has, but another worker could not send values to.
        self.cut: set[str] = set()
        self.leaving: dict[str, str] = {}  # causes; these workers serve until they leave
        self.excused: set[str] = set()  # failed to answer once, perhaps because they leave
        self.waiting: set[str] = set()  # have yet to host the binding, as they have just said
        self.running: dict[str, Sequence[tuple[str, str]]] = {}  # (node, task) at the last answer

    @property
    def alive(self) -> list[str]:
        """Addresses of the workers that are not lost."""
        return [address for address in self.workers if address not in self.lost]

    def running_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The tasks that run on some workers, as ``node/task``."""
        running = dict(self.running)
        names: list[str] = []
        for address in addresses:
            names += map("/".join, running.get(address, ()))
        return tuple(names)

    def nodes_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The nodes on some workers."""
        return tuple(node for node, address in self.placement.items() if address in addresses)

    def error(self, epoch: int | None) -> NodeLostError:
        """The error that names the lost workers."""
        lost = dict(self.lost)
        # A worker that is only unreachable was not killed by a task.
        died = [address for address in lost if address not in self.cut]
        descriptions = [self._describe_loss(address, how) for address, how in lost.items()]
        workers = f"worker {descriptions[0]}"
        if len(descriptions) > 1:
            workers = f"{len(descriptions)} workers: {'; '.join(descriptions)}"
        return NodeLostError(
            f"Lost{_at(epoch)}: {workers}. The workspaces of their nodes are gone.",
            nodes=self.nodes_on(lost),
            worker=next(iter(lost)),
            epoch=epoch,
            running=self.running_on(died),
        )

    def _describe_loss(self, address: str, how: str) -> str:
        nodes = self.nodes_on([address])
        running = self.running_on([address])
        description = "no nodes"
        if nodes:
            description = listed(map(repr, nodes), 10)
        if running:
            description += f" and ran {listed(running)}"
        return f"{address}, which had {description} ({how})"


@dataclass(slots=True)
class Request:
    """A request to workers."""

    call: str  # name of the worker's method
    details: dict[str, Any] = field(default_factory=dict)  # its arguments, for the first message
    per_worker: dict[str, dict[str, Any]] = field(default_factory=dict)  # more, by address
    channel: str = ""  # calls on different channels may run at the same time
    number: int = 0  # the same number counts once
    deadline_seconds: float | None = None  # for the whole operation
    group: str = ""  # for errors
    activity: str = ""  # for errors, if it does not run a group
    epoch: int | None = None  # for errors
    has_steps: bool = False  # for errors: it runs steps of an epoch

    def mailings(
        self, addresses: Sequence[str], unstarted: Collection[str], wait_seconds: float
    ) -> list[Mailing]:
        """The messages that start the operation on some workers, and ask the others for its reply."""
        poll = {"call": self.call, "number": self.number, "wait_seconds": float(wait_seconds)}
        if self.channel:
            poll["channel"] = self.channel
        first = {**poll, **self.details}
        mailings: list[Mailing] = []
        to_start: list[str] = []
        to_poll: list[str] = []
        for address in addresses:
            if address not in unstarted:
                to_poll.append(address)
            elif address in self.per_worker:
                mailings.append(Mailing({**first, **self.per_worker[address]}, [address]))
            else:
                to_start.append(address)
        if to_start:
            mailings.append(Mailing(first, to_start))
        if to_poll:
            mailings.append(Mailing(poll, to_poll))
        return mailings

    def failure(self, replies: Mapping[str, Reply], job: str) -> BaseException | None:
        """A worker's error, if any; what several workers refuse is one error."""
        failed = []
        for reply in replies.values():
            if reply.failure is not None:
                failed.append(self._failed(reply, reply.failure, job))
        if failed:
            if self.call == "apply" and {type(error) for error in failed} == {DefinitionError}:
                failed[0].args = ("\n".join(dict.fromkeys(map(str, failed))),)
            return failed[0]
        for address, reply in replies.items():
            if reply.status != "done":
                reason = reply.reason or f"it answered {reply.status!r}"
                return ExecutionError(
                    f"Worker {address} did not finish its part of {self._name()}: {reason}. Start "
                    f"the job again."
                )
        return None

    def late(self, nodes: Sequence[str], running: Sequence[str]) -> ExecutionError:
        """The error for a passed deadline."""
        name = self._name()
        return ExecutionError(
            f"{name[0].upper()}{name[1:]} did not end within {self.deadline_seconds:g} s"
            f"{_at(self.epoch)}. Still waiting for {listed(map(repr, nodes))} (running: "
            f"{listed(running)}). Check what blocks them, or allow more time."
        )

    def _name(self) -> str:
        return self.activity or f"the {self.group} group"

    def _failed(self, reply: Reply, failure: Failure, job: str) -> BaseException:
        epoch = self.epoch
        if reply.epoch is not None:
            epoch = reply.epoch
        at = _at(epoch)
        if self.has_steps:
            at += f", step {reply.step + 1}"
        cause = failure.exception()
        trace = with_source_lines(failure.traceback)
        if failure.is_own:
            error = cause
            is_ours = not failure.traceback and isinstance(
                error, DefinitionError | BlobNotFoundError
            )
            if failure.node and is_ours:
                error.args = (f"Job {job!r}, group {self.group!r}{at}: {error}",)
        else:
            where = f"node {failure.node!r}, group {self.group!r}, job {job!r}"
            hint = ""
            if failure.traceback:
                hint = " The remote traceback shows where."
            if failure.summary.endswith("read-only"):  # as NumPy says
                hint += " Inputs are read-only: name what the task changes in updates=."
            error = TaskFailedError(
                f"Task {failure.task!r} ({where}) failed{at}: {failure.summary.rstrip('.')}.{hint}",
                job=job,
                node=failure.node,
                task=failure.task,
                group=self.group,
                epoch=epoch,
                remote_traceback=trace,
            ).advise("Fix the task and start the same command again.")
            error.__cause__ = cause
        if trace:
            error.add_note(f"On the worker:\n{trace}")
        return error


def _at(epoch: int | None) -> str:
    return "" if epoch is None else f" at epoch {epoch}"


def pickle_function(fn: Any, subject: str) -> bytes:
    """Pickle a function for the workers; `DefinitionError` if it cannot be pickled."""
    try:
        return dumps_definitions(fn)
    except Exception as error:
        raise DefinitionError(
            f"{subject} cannot be pickled, so no worker can run it: {type(error).__name__}: {error}. "
            f"Create files, sockets, locks and models on a GPU inside the function."
        ) from error


# ---- what workers may answer: data of another machine, checked before anything uses it

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Reply(msgspec.Struct, frozen=True):
    """A worker's reply to a request."""

    status: Literal["done", "running", "failed", "aborted", "waiting", "stale", "unknown"]
    tasks: Sequence[tuple[str, str]] = ()  # those that run, as (node, task)
    runs: Sequence[EndedRun] = ()
    failure: Failure | None = None
    epoch: int | None = None  # in which it failed
    step: Count = 0  # of it, from 0
    reason: str = ""  # why it was aborted
    suspect: str = ""  # address of a worker that this one could not reach
    frames: Frames | None = None
    capture_bytes: Count | None = None  # see `Keeper.capture_bytes`


def malformed(address: str, problem: str) -> ExecutionError:
    """The error for an answer that no worker of this version gives."""
    return ExecutionError(
        f"Worker {address} gave an answer that does not fit what it was asked: {problem}. Check that "
        f"the same version of jobrunner runs there, and who can reach the cluster."
    )


# ---- the exchange


class Mailing(NamedTuple):
    """A message, and the addresses of the workers that get it."""

    message: Message
    addresses: Sequence[str]


class Ask(NamedTuple):
    """Send messages and collect the answers; workers delay these by at most `wait_seconds`."""

    mailings: Sequence[Mailing]
    addresses: Sequence[str]  # all workers that are asked
    wait_seconds: float


class Abort(NamedTuple):
    """Stop workers from starting more tasks of the current run."""

    addresses: Collection[str]
    reason: str


class AwaitNews(NamedTuple):
    """Wait for news of a lost worker, or that worker `leaving` is about to leave."""

    seconds: float
    leaving: str = ""


class Heard(NamedTuple):
    """The result of an action."""

    now: float  # time in seconds
    answers: Mapping[str, Answer] = {}  # to `Ask`, by address; empty if a worker is lost


Action = Ask | Abort | AwaitNews


def exchange(
    request: Request, addresses: Sequence[str], members: Members, now: float
) -> Generator[Action, Heard, dict[str, Reply]]:
    """Send a request, poll until each worker has replied, and notice lost workers.

    Yields actions, and takes their results. Returns the replies in the order of `addresses`. Notes
    in `members` which tasks run and which workers are lost; other code may add losses at any time.

    Raises an `ExecutionError` if a deadline passed; `NodeLostError` if a worker is lost: the
    scheduler removed it, it stays silent, its answer is an error, or it restarted.
    """
    # A lost answer costs nothing: every message has the request's number, so a worker that has begun
    # it answers how far it is, and one that has not, as `unstarted` supposes, begins it.
    is_run = request.call == "run"
    is_aborted = False
    started = now
    warn_seconds = WARN_SECONDS
    wait_seconds = FIRST_WAIT_SECONDS
    recipients = [*addresses]
    unstarted = set(addresses)  # they may not have got the first message
    replies: dict[str, Reply] = {}
    while True:
        mailings = request.mailings(recipients, unstarted, wait_seconds)
        heard = yield Ask(mailings, recipients, wait_seconds)
        unstarted.clear()
        for address, answer in heard.answers.items():
            if isinstance(answer, BaseException):
                # The scheduler disconnects a worker that leaves once; the worker still serves.
                may_leave = address not in members.excused
                members.excused.add(address)
                if may_leave and address not in members.leaving and not members.lost:
                    yield AwaitNews(NEWS_SECONDS, address)
                if not may_leave or address not in members.leaving:
                    members.lost.setdefault(address, f"{type(answer).__name__}: {answer}")
                unstarted.add(address)
                continue
            if not isinstance(answer, Mapping) or answer.get("status") == "unknown":
                members.lost.setdefault(address, "it restarted and lost this session's state")
                continue
            reply = read_reply(address, answer, members.placement)
            members.waiting.discard(address)
            if reply.status == "waiting":
                unstarted.add(address)
                members.waiting.add(address)
            elif reply.status != "running":
                replies[address] = reply
                if is_run:
                    members.running.pop(address, None)
            elif is_run:
                members.running[address] = reply.tasks
        for reply in replies.values():
            if reply.suspect and not members.lost:
                yield AwaitNews(LOSS_SECONDS)
                if not members.lost:
                    members.lost[reply.suspect] = reply.reason
                    members.cut.add(reply.suspect)
        if members.lost:
            # This may reveal further losses.
            yield Abort(members.alive, f"worker {next(iter(members.lost))} is lost")
            raise members.error(request.epoch)
        if len(replies) == len(addresses):
            return {address: replies[address] for address in addresses}
        pending: list[str] = []
        recipients = []
        for address in addresses:
            reply_here = replies.get(address)
            if reply_here is None:
                pending.append(address)
            # A worker is "done" before others have its values, and sending these may still fail. Then
            # others wait for them, and only the sender can say of whom they could not be taken.
            if reply_here is None or (is_run and reply_here.status == "done"):
                recipients.append(address)
        if is_run and len(recipients) < len(addresses) and not is_aborted:
            is_aborted = True
            heard = yield Abort(pending, "another worker's part has failed")
        wait_seconds = POLL_SECONDS
        now = heard.now
        if request.activity and now - started > warn_seconds:
            warn_seconds *= 2
            late = listed(map(repr, members.nodes_on(pending)))
            delay = f"{request.activity.capitalize()} has taken {now - started:.0f} s"
            logger.warning("%s. Still waiting for %s.", delay, late)
        if request.deadline_seconds is not None:
            left = request.deadline_seconds - (now - started)
            if left <= 0:
                raise request.late(members.nodes_on(pending), members.running_on(pending))
            wait_seconds = min(wait_seconds, left)


def read_reply(address: str, answer: object, placement: Mapping[str, str]) -> Reply:
    """Check a worker's answer, for what is common to all requests.

    `placement` says where each node is: a worker speaks only of its own nodes, and suspects only
    workers in use. Raises an `ExecutionError` that names the worker.
    """
    try:
        reply = msgspec.convert(answer, Reply)
    except msgspec.ValidationError as error:
        raise malformed(address, str(error)) from error
    tasks = [*reply.tasks]
    if reply.failure is not None and reply.failure.node:
        tasks.append((reply.failure.node, ""))
    for node, _ in tasks:
        if placement.get(node) != address:
            raise malformed(address, f"node {node!r:.80} is not on that worker")
    if reply.suspect and reply.suspect not in placement.values():
        raise malformed(address, f"suspect {reply.suspect!r:.80} is no worker in use")
    return reply
