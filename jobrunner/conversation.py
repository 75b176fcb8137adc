"""4 run: what a binding and its workers tell each other, and what is heard of losses.

An operation is started by a first message and polled by the next ones. A worker counts as lost
when the scheduler says so, when its answer is an error or comes from a successor that knows
nothing, or when it stays silent; whatever was asked then ends at once with `NodeLostError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Future

from jobrunner.cluster import Answer, Cluster, Silence
from jobrunner.config import get_count
from jobrunner.direct import DirectLines
from jobrunner.errors import ExecutionError, NodeLostError, SchedulerLostError
from jobrunner.outbox import Message
from jobrunner.outcome import Failure
from jobrunner.placement import WorkerInfo

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.25
"""How long a first message waits for its operation's end.

It holds one of the scheduler's connections meanwhile, and with more workers than connections the
next ones must get theirs for slices that wait for each other to begin at all.
"""
POLL_SECONDS = 2.0
TELL_SECONDS = 0.3
"""How long to wait for workers to hear that a run is aborted, when something else is urgent."""
NEWS_SECONDS = 0.5
"""How long to wait for the scheduler's word on a worker whose answer was an error."""
LEAVING_SECONDS = 3.0
"""How long a worker that leaves may keep an answer back, beyond what it was allowed."""
LOSS_SECONDS = 2.0
"""How long to wait for the scheduler's word on a worker that another one could not reach."""


AGAIN: Message = {"status": "again"}
"""In place of an answer that got lost: the very same message is to be sent once more."""


@dataclass(slots=True)
class Held:
    """A worker in use by a binding."""

    info: WorkerInfo
    incarnation: str
    leases: list[Future[Any]] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """An operation to be started on workers.

    Attributes
    ----------
    call : str
        The host's method.
    details : dict
        What it is told; with `is_separate`, by address.
    is_separate : bool
    channel : str
        Operations of one call on several channels may be under way at the same time; of one
        channel, one after another.
    number : int
    started : float
        Of the operation, and its monotonic time; set when it begins.
    deadline_seconds, task_deadline_seconds : float or None
        For the operation, and for each task that runs in it.
    group : str
    epoch : int or None
        What to say in errors.
    is_careful : bool
        Workers answer whenever a task is about to begin, and wait for the next message.
    """

    call: str
    details: dict[str, Any] = field(default_factory=dict)
    is_separate: bool = False
    channel: str = ""
    number: int = 0
    started: float = 0.0
    deadline_seconds: float | None = None
    task_deadline_seconds: float | None = None
    group: str = ""
    epoch: int | None = None
    is_careful: bool = False


class Conversation:
    """One binding's exchange with its workers.

    Parameters
    ----------
    cluster : Cluster
    name : str
        The binding's.
    placement : mapping of str to str
        Node -> address; the binding's own, which grows.

    Attributes
    ----------
    workers : dict of str to Held
        By address.
    lost : dict of str to str
        Address -> how we know.
    cut : set of str
        Of those lost, the ones that another worker could not hand values to; the scheduler still
        has them.
    leaving : dict of str to str
        Address -> how we know; of workers that are about to leave, and serve until then.
    number : int
        Of the latest operation.
    run_number : int
        Of the latest run.

    Notes
    -----
    Coroutines run on the client's event loop.
    """

    def __init__(self, cluster: Cluster, name: str, placement: Mapping[str, str]) -> None:
        self.workers: dict[str, Held] = {}
        self.lost: dict[str, str] = {}
        self.cut: set[str] = set()
        self.leaving: dict[str, str] = {}
        self.number = 0
        self.run_number = 0
        self._cluster = cluster
        self._name = name
        self._placement = placement
        self._interrupted = asyncio.Event()
        self._news = asyncio.Event()
        self._excused: set[str] = set()
        self._is_in_doubt = False  # whether all that was there is there still
        self._running: dict[str, list[tuple[str, str]]] = {}  # by worker, as last heard
        self._lines = DirectLines(cluster.client, get_count("direct-workers"))

    @property
    def alive(self) -> list[str]:
        """Addresses of the workers that are not known to be lost."""
        return [address for address in self.workers if address not in self.lost]

    @property
    def running(self) -> tuple[str, ...]:
        """The tasks that ran when their workers were last heard, as ``node/task``."""
        heard = tuple(self._running.values())
        return tuple(f"{node}/{task}" for tasks in heard for node, task in tasks)

    async def meet(self, infos: Collection[WorkerInfo]) -> dict[str, Answer]:
        """Take workers into use; gives the answers of those that don't take part, if any."""
        addresses = [info.address for info in infos]
        # Whoever is lost from now on is heard of; whoever was lost just before does not answer.
        self._cluster.watch(addresses, self._hear)
        answers: dict[str, Answer] = {}
        try:
            answers = await self._cluster.ask({"call": "hello"}, addresses, 0, asyncio.Event())
        except Silence:
            logger.info("Not all of %s answer", addresses)
        strange = {
            address: answer
            for address in addresses
            if not isinstance(answer := answers.get(address, {}), dict)
            or "incarnation" not in answer
        }
        if strange:
            self._cluster.unwatch(addresses, self._hear)
            for address in addresses:
                self.lost.pop(address, None)
                self.leaving.pop(address, None)
            if not self.lost:
                self._interrupted.clear()
        else:
            for info in infos:
                incarnation = answers[info.address]["incarnation"]  # type: ignore[index]
                self.workers[info.address] = Held(info, incarnation)
        return strange

    async def bind(
        self, leases: Mapping[str, str], deadline: float, details: Mapping[str, Any]
    ) -> list[str]:
        """Wait until lease tasks run and their workers host the binding; gives the late ones."""
        waiting = list(leases)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            message = {
                "call": "bind",
                "binding": self._name,
                "leases": dict(leases),
                "wait_seconds": min(FIRST_WAIT_SECONDS, left),
                **details,
            }
            answers = await self._ask(message, waiting, FIRST_WAIT_SECONDS, None)
            for answer in answers.values():
                if answer["status"] == "failed":
                    raise Failure(**answer["failure"]).exception()
            waiting = [a for a in waiting if answers[a]["status"] != "done"]
            if not left:
                break
        return waiting

    async def ask(self, call: str, **details: Any) -> dict[str, Message]:
        """Ask all workers what they can answer at once."""
        message = {"call": call, "binding": self._name, **details}
        answers: dict[str, Message] = {}
        while missing := [a for a in self.workers if answers.get(a, AGAIN) is AGAIN]:
            answers.update(await self._ask(message, missing, 0, None))
        return answers

    def try_directly(self, request: Request, addresses: Sequence[str]) -> dict[str, Message] | None:
        """Let workers do something at once, without the scheduler.

        Called in any thread but the client's loop's. Gives the replies if that worked on all of
        them; else nobody knows what they have heard, and `operate` makes sure.
        """
        self._check_leases()
        if self.lost or self._lines.is_over:
            return None
        answers = self._lines.ask(
            {**self._common(request), "wait_seconds": FIRST_WAIT_SECONDS, **request.details},
            {address: self.workers[address].incarnation for address in addresses},
            FIRST_WAIT_SECONDS,
        )
        self._is_in_doubt = self._lines.is_over
        if answers is None or any(answer.get("status") != "done" for answer in answers.values()):
            return None
        return answers

    async def operate(self, request: Request, addresses: Sequence[str]) -> dict[str, Message]:
        """Start an operation and ask until every worker has answered.

        Returns
        -------
        dict
            Address -> final reply, in the order of `addresses`.

        Raises
        ------
        NodeLostError
        ExecutionError
            The deadline passed, or the scheduler is gone.
        """
        if self._is_in_doubt:
            self._is_in_doubt = False
            await self._await_news()
        started = request.started
        common = self._common(request)
        wait_seconds = FIRST_WAIT_SECONDS
        first = {**common, "wait_seconds": wait_seconds}
        messages: Message | dict[str, Message] = {**first, **request.details}
        if request.is_separate:
            messages = {a: {**first, **details} for a, details in request.details.items()}
        beginning = messages
        since: dict[tuple[str, str], float] = {}  # task -> when it was first heard to run
        pending = asked = list(addresses)
        replies: dict[str, Message] = {}
        is_failed = False
        while True:
            unheard: set[str] = set()
            for address, answer in (
                await self._ask(messages, asked, wait_seconds, request.epoch)
            ).items():
                if answer is AGAIN:
                    unheard.add(address)
                elif answer["status"] == "running":
                    if request.call == "run":
                        self._running[address] = answer["tasks"]
                else:
                    if request.call == "run":
                        self._running.pop(address, None)
                    replies[address] = answer
                    if "suspect" in answer:
                        await self._await_loss(answer, request.epoch)
            pending = [address for address in pending if address not in replies]
            if not pending:
                return {address: replies[address] for address in addresses}
            if not is_failed and any(reply["status"] != "done" for reply in replies.values()):
                is_failed = True
                if request.call == "run":  # else it has nothing to do with a run meanwhile
                    await self.abort(pending, "another worker's part has failed", TELL_SECONDS)
            # A worker's part is done before others have what it made, and that may fail still.
            asked = list(addresses) if request.call == "run" and not is_failed else pending
            wait_seconds = POLL_SECONDS
            if request.deadline_seconds is not None:
                left = request.deadline_seconds - (time.monotonic() - started)
                if left <= 0:
                    raise self._late(pending, request)
                wait_seconds = min(wait_seconds, left)
            if request.task_deadline_seconds is not None:
                now = time.monotonic()
                running = [(node, task) for a in pending for node, task in self._running.get(a, ())]
                since = {task: since.get(task, now) for task in running}
                left = min(since.values(), default=now) + request.task_deadline_seconds - now
                if left <= 0:
                    raise self._overlong(min(since, key=since.__getitem__), request)
                wait_seconds = min(wait_seconds, max(left, 0.01))
            messages = {**common, "wait_seconds": wait_seconds}
            if unheard:
                # Whether they heard how it began is not known; it counts once.
                poll = messages
                messages = {a: _for(a, beginning if a in unheard else poll) for a in asked}

    async def operate_each(self, request: Request, addresses: Sequence[str]) -> dict[str, Message]:
        """The same as `operate`, where no worker is to wait for the answers of others."""
        parts = [self.operate(request, [address]) for address in addresses]
        replies: dict[str, Message] = {}
        for part in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(part, BaseException):
                raise part
            replies.update(part)
        return replies

    async def abort(self, addresses: Sequence[str], reason: str, wait_seconds: float) -> None:
        """Let nothing of the current run start any more on some workers."""
        await self._try_to_send(
            {"call": "abort", "number": self.run_number, "reason": reason}, addresses, wait_seconds
        )

    async def part(self, wait_seconds: float, heir: str = "") -> None:
        """Let the workers free what the binding has there, but for what its heir gets."""
        message = {"call": "release", "heir": heir}
        await self._try_to_send(message, self.alive, wait_seconds)

    def leave(self) -> None:
        """Listen to the workers no more."""
        self._lines.close()
        self._cluster.unwatch(list(self.workers), self._hear)

    # ---- within

    def _common(self, request: Request) -> Message:
        common = {"call": request.call, "binding": self._name, "number": request.number}
        if request.channel:
            common["channel"] = request.channel
        return common

    def _check_leases(self) -> None:
        for address, worker in self.workers.items():
            for lease in worker.leases:
                if lease.status in ("cancelled", "lost", "error"):
                    self.lost.setdefault(address, f"its lease task was {lease.status}")

    async def _try_to_send(
        self, message: Message, addresses: Sequence[str], wait_seconds: float
    ) -> None:
        if addresses:
            message = {**message, "binding": self._name}
            try:
                await asyncio.wait_for(self._cluster.send(message, addresses), wait_seconds)
            except (TimeoutError, OSError) as error:
                logger.info("%s may not have reached %s: %r", message["call"], addresses, error)

    async def _ask(
        self,
        messages: Message | Mapping[str, Message],
        addresses: Sequence[str],
        wait_seconds: float,
        epoch: int | None,
    ) -> dict[str, Message]:
        """One round of questions; a worker that is lost ends it."""
        self._check_leases()
        if self.lost:
            raise await self._node_lost(epoch)
        leaving = [address for address in addresses if address in self.leaving]
        staying = [address for address in addresses if address not in self.leaving]
        asking = [
            asyncio.ensure_future(self._ask_leaving(a, _for(a, messages), wait_seconds))
            for a in leaving
        ]
        answers: dict[str, Answer] = {}
        try:
            if staying:
                told = messages if "call" in messages else {a: _for(a, messages) for a in staying}
                answers = await self._cluster.ask(told, staying, wait_seconds, self._interrupted)
            for address, task in zip(leaving, asking, strict=True):
                answers[address] = await task
        except Silence:
            answers = {address: {"status": "running", "tasks": []} for address in addresses}
            seconds = self._cluster.silence_seconds
            for address in await self._cluster.find_silent(addresses):
                self.lost[address] = f"it has not answered for {seconds:g} s"
        except OSError as error:
            raise SchedulerLostError(
                f"The scheduler of {self._cluster.client!r} cannot be reached any more: {error}. "
                f"Start the same command again; it goes on from the last recorded epoch."
            ) from error
        finally:
            for task in asking:
                task.cancel()
        for address, answer in answers.items():
            if isinstance(answer, BaseException):
                if await self._is_excused(address):
                    answers[address] = AGAIN
                else:
                    self.lost.setdefault(address, f"{type(answer).__name__}: {answer}")
            elif not isinstance(answer, Mapping) or answer.get("status") == "unknown":
                self.lost.setdefault(address, "it knows nothing of this session (any more)")
        if self.lost:
            raise await self._node_lost(epoch)
        return answers  # type: ignore[return-value]

    async def _await_news(self) -> None:
        """A connection broke: soon there is word of the worker, or none from the scheduler."""
        deadline = time.monotonic() + NEWS_SECONDS
        while not (self.lost or self.leaving) and time.monotonic() < deadline:
            self._cluster.check_open()
            await asyncio.sleep(NEWS_SECONDS / 50)

    async def _await_loss(self, answer: Message, epoch: int | None) -> None:
        """A worker could not reach another: soon the scheduler says whether that one is lost."""
        try:
            await asyncio.wait_for(self._interrupted.wait(), LOSS_SECONDS)
        except TimeoutError:
            self.lost[answer["suspect"]] = answer["reason"]
            self.cut.add(answer["suspect"])
        raise await self._node_lost(epoch)

    async def _ask_leaving(self, address: str, message: Message, wait_seconds: float) -> Answer:
        """Ask a worker that may be gone, and then takes Dask half a minute to connect to."""
        try:
            sending = self._cluster.send(message, [address])
            return (await asyncio.wait_for(sending, wait_seconds + LEAVING_SECONDS))[address]
        except TimeoutError as error:
            self.lost.setdefault(address, f"{self.leaving[address]}, and now it is gone")
            return error

    async def _is_excused(self, address: str) -> bool:
        """Whether there was no answer because the scheduler let go of a worker that leaves."""
        if address in self._excused:  # that happens once
            return False
        self._excused.add(address)
        deadline = time.monotonic() + NEWS_SECONDS
        while address not in self.leaving and not self.lost:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                break
        return address in self.leaving and address not in self.lost

    def _hear(self, address: str, is_lost: bool) -> None:
        """The scheduler says that the worker is gone, or goes."""
        if is_lost:
            self.lost.setdefault(address, "the scheduler removed it")
            self._interrupted.set()
            if address in self.workers:
                self._lines.hang_up()
        else:
            self.leaving.setdefault(address, "the scheduler retires it")
        self._news.set()

    async def _node_lost(self, epoch: int | None) -> NodeLostError:
        """The error to raise, once the other workers know; `lost` says who is to blame."""
        first = next(iter(self.lost))
        if self.run_number:
            await self.abort(self.alive, f"worker {first} is lost", TELL_SECONDS)
        # By now it may be known of others as well.
        lost = dict(self.lost)
        nodes = tuple(node for node, its in self._placement.items() if its in lost)
        # No task is to blame for the network.
        died = [address for address in lost if address not in self.cut]
        running = [f"{node}/{task}" for a in died for node, task in self._running.get(a, ())]
        when = f" at epoch {epoch}" if epoch is not None else ""
        told = [self._tell_of_loss(address, how) for address, how in lost.items()]
        said = f"worker {told[0]}" if len(told) == 1 else f"{len(told)} workers: {'; '.join(told)}"
        return NodeLostError(
            f"Lost{when}: {said}. The workspaces of those nodes are gone.",
            nodes=nodes,
            worker=first,
            epoch=epoch,
            running=tuple(running),
        )

    def _tell_of_loss(self, address: str, how: str) -> str:
        nodes = [node for node, its in self._placement.items() if its == address]
        names = ", ".join(map(repr, nodes[:10])) + (", …" if len(nodes) > 10 else "")
        running = [f"{node}/{task}" for node, task in self._running.get(address, ())]
        what = f" and ran {', '.join(running)}" if running else ""
        return f"{address}, which held {names or 'no nodes'}{what} ({how})"

    def _overlong(self, task: tuple[str, str], request: Request) -> ExecutionError:
        node, name = task
        when = f" at epoch {request.epoch}" if request.epoch is not None else ""
        return ExecutionError(
            f"Task {node}/{name} of the {request.group} group did not end within "
            f"{request.task_deadline_seconds:g} s{when}, on worker {self._placement.get(node)}. "
            f"Find out what holds it up, or allow more time."
        )

    def _late(self, pending: Sequence[str], request: Request) -> ExecutionError:
        running = [f"{node}/{task}" for a in pending for node, task in self._running.get(a, ())]
        late = [node for node, address in self._placement.items() if address in pending]
        when = f" at epoch {request.epoch}" if request.epoch is not None else ""
        return ExecutionError(
            f"The {request.group} group did not end within {request.deadline_seconds:g} s{when}. "
            f"Late are the workers of {', '.join(map(repr, late))}; running there: "
            f"{', '.join(running) or 'nothing'}. Find out what holds these up, or allow more time."
        )


def _for(address: str, messages: Message | Mapping[str, Message]) -> Message:
    """What one worker is told."""
    own: Message = messages if "call" in messages else messages[address]  # type: ignore[assignment]
    return own
