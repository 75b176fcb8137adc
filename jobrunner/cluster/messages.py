"""4 run: what a binding and its workers tell each other.

An operation is started by a first message and polled by the next ones. A worker counts as lost
when its `Membership` says so, when its answer is an error or comes from a successor that knows
nothing, or when it stays silent; whatever was asked then ends at once with `NodeLostError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jobrunner.cluster.direct import DirectLines
from jobrunner.cluster.members import Member, Membership
from jobrunner.cluster.placement import WorkerInfo
from jobrunner.cluster.request import Request
from jobrunner.cluster.workers import Answer, Cluster, Silence
from jobrunner.errors import NodeLostError, SchedulerLostError
from jobrunner.worker import Failure, Message

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.25
"""How long a first message waits for its operation's end.

It holds one of the scheduler's connections meanwhile, and with more workers than connections the
next ones must get theirs for slices that wait for each other to begin at all.
"""
POLL_SECONDS = 2.0
TOLD_SECONDS = 60.0
"""When a log message first tells who is late, where no progress is shown."""
TELL_SECONDS = 0.3
"""How long to wait for workers to hear that a run is aborted, when something else is urgent."""
LEAVING_SECONDS = 3.0
"""How long a worker that leaves may keep an answer back, beyond what it was allowed."""

AGAIN: Message = {"status": "again"}
"""In place of an answer that got lost: the very same message is to be sent once more."""


class Conversation:
    """One binding's exchange with its workers.

    Parameters
    ----------
    cluster : Cluster
    name : str
        The binding's.
    members : Membership
        Who takes part; grows with `meet`, and learns here of losses that nobody else hears of.

    Attributes
    ----------
    number : int
        Of the latest operation.
    run_number : int
        Of the latest run.

    Notes
    -----
    Coroutines run on the client's event loop.
    """

    def __init__(
        self, cluster: Cluster, name: str, members: Membership, lines: DirectLines
    ) -> None:
        self.number = 0
        self.run_number = 0
        self._cluster = cluster
        self._name = name
        self._members = members
        self._lines = lines
        self._is_in_doubt = False  # whether all that was there is there still

    async def meet(self, infos: Collection[WorkerInfo]) -> dict[str, Answer]:
        """Take workers into use; gives the answers of those that don't take part, if any."""
        addresses = [info.address for info in infos]
        # Whoever is lost from now on is heard of; whoever was lost just before does not answer.
        self._members.watch(addresses)
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
            self._members.dismiss(addresses)
        else:
            for info in infos:
                incarnation = answers[info.address]["incarnation"]  # type: ignore[index]
                self._members.workers[info.address] = Member(info, incarnation)
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
        while missing := [a for a in self._members.workers if answers.get(a, AGAIN) is AGAIN]:
            answers.update(await self._ask(message, missing, 0, None))
        return answers

    def try_directly(self, request: Request, addresses: Sequence[str]) -> dict[str, Message] | None:
        """Let workers do something at once, without the scheduler.

        Called in any thread but the client's loop's. Gives the replies if that worked on all of
        them; else nobody knows what they have heard, and `operate` makes sure.
        """
        self._members.check_leases()
        if self._members.lost or self._lines.is_over:
            return None
        answers = self._lines.ask(
            {**self._common(request), "wait_seconds": FIRST_WAIT_SECONDS, **request.details},
            {a: self._members.workers[a].incarnation for a in addresses},
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
            await self._members.await_news()
        members = self._members
        started = request.started
        told_seconds = TOLD_SECONDS
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
                        members.running[address] = answer["tasks"]
                else:
                    if request.call == "run":
                        members.running.pop(address, None)
                    replies[address] = answer
                    if "suspect" in answer:
                        await members.await_loss(answer["suspect"], answer["reason"])
                        raise await self._node_lost(request.epoch)
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
            if request.what and time.monotonic() - started > told_seconds:
                told_seconds *= 2
                late = ", ".join(map(repr, members.nodes_on(pending)))
                logger.warning(
                    "%s has taken %.0f s; late are the workers of %s.",
                    request.what.capitalize(),
                    time.monotonic() - started,
                    late,
                )
            if request.deadline_seconds is not None:
                left = request.deadline_seconds - (time.monotonic() - started)
                if left <= 0:
                    raise request.late(members.nodes_on(pending), members.running_on(pending))
                wait_seconds = min(wait_seconds, left)
            if request.task_deadline_seconds is not None:
                now = time.monotonic()
                running = [task for a in pending for task in members.running.get(a, ())]
                since = {task: since.get(task, now) for task in running}
                left = min(since.values(), default=now) + request.task_deadline_seconds - now
                if left <= 0:
                    node, name = min(since, key=since.__getitem__)
                    raise request.overlong(f"{node}/{name}", members.worker_of(node))
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
        await self._try_to_send(message, self._members.alive, wait_seconds)

    def leave(self) -> None:
        """Listen to the workers no more."""
        self._lines.close()
        self._members.leave()

    # ---- within

    def _common(self, request: Request) -> Message:
        common = {"call": request.call, "binding": self._name, "number": request.number}
        if request.channel:
            common["channel"] = request.channel
        return common

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
        members = self._members
        members.check_leases()
        if members.lost:
            raise await self._node_lost(epoch)
        leaving = [address for address in addresses if address in members.leaving]
        staying = [address for address in addresses if address not in members.leaving]
        asking = [
            asyncio.ensure_future(self._ask_leaving(a, _for(a, messages), wait_seconds))
            for a in leaving
        ]
        answers: dict[str, Answer] = {}
        try:
            if staying:
                told = messages if "call" in messages else {a: _for(a, messages) for a in staying}
                answers = await self._cluster.ask(told, staying, wait_seconds, members.interrupted)
            for address, task in zip(leaving, asking, strict=True):
                answers[address] = await task
        except Silence:
            await self._cluster.identity()  # or it is the scheduler that is silent
            answers = {address: {"status": "running", "tasks": []} for address in addresses}
            seconds = self._cluster.silence_seconds
            for address in await self._cluster.find_silent(addresses):
                members.lost[address] = f"it has not answered for {seconds:g} s"
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
                if await members.is_excused(address):
                    answers[address] = AGAIN
                else:
                    members.lost.setdefault(address, f"{type(answer).__name__}: {answer}")
            elif not isinstance(answer, Mapping) or answer.get("status") == "unknown":
                members.lost.setdefault(address, "it knows nothing of this session (any more)")
        if members.lost:
            raise await self._node_lost(epoch)
        return answers  # type: ignore[return-value]

    async def _ask_leaving(self, address: str, message: Message, wait_seconds: float) -> Answer:
        """Ask a worker that may be gone, and then takes Dask half a minute to connect to."""
        try:
            sending = self._cluster.send(message, [address])
            return (await asyncio.wait_for(sending, wait_seconds + LEAVING_SECONDS))[address]
        except TimeoutError as error:
            members = self._members
            members.lost.setdefault(address, f"{members.leaving[address]}, and now it is gone")
            return error

    async def _node_lost(self, epoch: int | None) -> NodeLostError:
        """The error to raise, once the other workers know; `lost` says who is to blame."""
        first = next(iter(self._members.lost))
        if self.run_number:
            await self.abort(self._members.alive, f"worker {first} is lost", TELL_SECONDS)
        return self._members.error(epoch)  # by now it may be known of others as well


def _for(address: str, messages: Message | Mapping[str, Message]) -> Message:
    """What one worker is told."""
    own: Message = messages if "call" in messages else messages[address]  # type: ignore[assignment]
    return own
