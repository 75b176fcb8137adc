"""4 run: the Dask plugin that hosts bindings on a worker, and the leases they live under."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import sys
import threading
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dask.system import CPU_COUNT
from distributed import Status, get_worker, secede
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT

from jobrunner.config import get_bytes, get_seconds, get_share
from jobrunner.errors import DefinitionError
from jobrunner.worker.hosted_nodes import HostedNodes, failed_reply
from jobrunner.worker.outbox import Message
from jobrunner.workspace import KeptStates

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)

# Goes up with every change of what the messages mean. Client and workers of different versions
# then don't share a handler, and each says plainly that the other is missing.
PROTOCOL_VERSION = 3
PLUGIN_NAME = f"jobrunner-{PROTOCOL_VERSION}"
OPERATION = f"jobrunner_call_{PROTOCOL_VERSION}"
LEASE_PREFIX = f"{PLUGIN_NAME}-lease"

LEGACY_SECONDS = 60.0
"""How long what a binding leaves waits for its heir: as long as nodes wait for workers."""

MOST_PINGS = 64
"""How many other workers one asks at the same time whether they are there."""

CLOSE_SECONDS = 2.0
"""How long a release waits for a binding's threads to end."""


class _Lease:
    """A lease task that the scheduler has started here."""

    def __init__(self) -> None:
        self.context: asyncio.Future[contextvars.Context] = (
            asyncio.get_running_loop().create_future()
        )
        self.ended = threading.Event()


class WorkspaceHost(WorkerPlugin):
    """Hosts the bindings of all sessions on one worker.

    Notes
    -----
    Runs on the worker's event loop. One handler takes all messages: ``call`` says what, and a
    failure is returned as a value. A binding lives as long as its lease task: when the client
    releases it or goes away, Dask cancels the task, and `transition` sees that.
    """

    # Or another client's registration would put an empty host in this one's place.
    idempotent = True
    name = PLUGIN_NAME

    def setup(self, worker: Worker) -> None:
        """Begin to serve."""
        self._worker = worker
        self.incarnation = secrets.token_hex(8)
        self.bindings: dict[str, HostedNodes] = {}
        self._leases: dict[str, _Lease] = {}
        self._own_switch_seconds = 0.0  # the process's, while bindings have set another
        self._legacies: dict[str, KeptStates] = {}  # by the binding that is to have them
        worker.handlers[OPERATION] = self.call

    def teardown(self, worker: Worker) -> Awaitable[None] | None:
        """Let go of everything: the worker closes, or the plugin is removed.

        A worker that closes as planned still serves until its nodes were moved elsewhere.
        """
        moving = [hosted for hosted in self.bindings.values() if hosted.can_move]
        if moving and worker.status == Status.closing and not worker.batched_stream.closed():
            return self._teardown_later(worker, moving)
        self._let_go(worker)
        return None

    async def _teardown_later(self, worker: Worker, moving: Sequence[HostedNodes]) -> None:
        logger.info("Worker %s stays until its nodes have moved", worker.address)
        with suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(hosted.ended.wait() for hosted in moving)),
                get_seconds("departure-seconds"),
            )
        self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        worker.handlers.pop(OPERATION, None)
        self._legacies.clear()
        for name in list(self.bindings):
            self._drop(name, "its worker closed")
        for key in list(self._leases):
            self._end_lease(key)

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Follow the lease tasks: what Dask starts and cancels, this hears of first."""
        if not (isinstance(key, str) and key.startswith(LEASE_PREFIX)):
            return
        if finish == "executing" and key not in self._leases:
            self._leases[key] = _Lease()
        elif start in ("executing", "long-running") and finish != "long-running":
            self._end_lease(key)

    async def call(self, call: str, binding: str = "", **details: Any) -> Message:
        """Answer a message of a session's client or of another worker's host."""
        try:
            if call == "hello":
                return {"status": "done", "incarnation": self.incarnation}
            if call == "reach":
                return await self._reach(**details)
            if call == "bind":
                return await self._bind(binding, **details)
            hosted = self.bindings.get(binding)
            if hosted is None:
                return {"status": "unknown"}
            if call == "release":
                return await self._release(binding, hosted, **details)
            handler = getattr(hosted, HANDLERS[call])
            reply: Message = await handler(**details)
            return reply
        except Exception as error:
            logger.exception("Message %r of binding %s failed", call, binding)
            return failed_reply(error)

    async def _bind(
        self,
        binding: str,
        leases: Mapping[str, str],
        wait_seconds: float,
        job: str,
        seed: int,
        attempt: int,
        can_move: bool,
        silence_seconds: float,
    ) -> Message:
        """Host a binding, once its lease task runs here."""
        key = leases[self._worker.address]
        lease = self._leases.get(key)
        if lease is None:
            # Dask starts it soon, or never: the client asks again.
            await asyncio.sleep(min(0.005, wait_seconds))
            lease = self._leases.get(key)
        if lease is not None:
            await asyncio.wait((lease.context,), timeout=wait_seconds)
        if lease is None or key not in self._leases or not lease.context.done():
            return {"status": "running", "tasks": []}
        if binding not in self.bindings:
            self._switch_sooner()
            self.bindings[binding] = HostedNodes(
                binding,
                job=job,
                seed=seed,
                attempt=attempt,
                address=self._worker.address,
                nthreads=self._worker.state.nthreads,
                context=lease.context.result(),
                call_peer=self._call_peer,
                used_bytes=self._worker.monitor.get_process_memory,
                # Without a nanny nobody kills it, and its process may be shared.
                limit_bytes=(self._worker.nanny and self._worker.memory_manager.memory_limit) or 0,
                memory_share=get_share("memory-share"),
                can_move=can_move,
                silence_seconds=silence_seconds,
                kept_states=self._legacies.pop(binding, None) or self._make_kept_states(),
            )
        return {"status": "done"}

    def _make_kept_states(self) -> KeptStates:
        share = min(1, self._worker.state.nthreads / CPU_COUNT)  # as Dask's "auto" has it
        limit = self._worker.memory_manager.memory_limit or int(share * MEMORY_LIMIT)
        try:
            return KeptStates(get_bytes("rollback-memory", limit))
        except ValueError as error:
            raise DefinitionError(f"On worker {self._worker.address}: {error}") from None

    async def _reach(self, addresses: Sequence[str], wait_seconds: float) -> Message:
        """Which of some workers this one cannot reach; each has that time to answer."""
        slots = asyncio.Semaphore(MOST_PINGS)

        async def is_cut(address: str) -> bool:
            async with slots:
                try:
                    ping = self._call_peer(address, {"call": "hello"})
                    await asyncio.wait_for(ping, wait_seconds)
                except (OSError, TimeoutError):
                    return True
            return False

        others = [address for address in addresses if address != self._worker.address]
        found = await asyncio.gather(*map(is_cut, others))
        cut = [address for address, is_it in zip(others, found, strict=True) if is_it]
        return {"status": "done", "cut": cut}

    async def _release(self, binding: str, hosted: HostedNodes, heir: str = "") -> Message:
        self._drop(binding, "the session released it")
        if heir and len(hosted.kept_states):
            self._legacies[heir] = hosted.kept_states
            self._worker.loop.call_later(LEGACY_SECONDS, self._legacies.pop, heir, None)
        with suppress(TimeoutError):
            await asyncio.wait_for(hosted.ended.wait(), CLOSE_SECONDS)
        return {"status": "done"}

    def _drop(self, binding: str, reason: str) -> None:
        hosted = self.bindings.pop(binding, None)
        if hosted is not None:
            hosted.close(reason)
            if not self.bindings and self._own_switch_seconds:
                sys.setswitchinterval(self._own_switch_seconds)
                self._own_switch_seconds = 0.0
        for key in [key for key in self._leases if binding_of(key) == binding]:
            self._end_lease(key)

    def _switch_sooner(self) -> None:
        """Let threads that hold the interpreter keep the event loop waiting for less long."""
        seconds = get_seconds("switch-seconds")
        # Without a nanny the process may be anybody's.
        if seconds and self._worker.nanny and not self._own_switch_seconds:
            self._own_switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(seconds, self._own_switch_seconds))

    def _end_lease(self, key: str) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.ended.set()
            lease.context.cancel()
            self._drop(binding_of(key), "its client released it or went away")

    def hold_lease(self, key: str) -> None:
        """Lend this thread's context to the binding, and block until the lease ends."""
        lease = self._leases.get(key)
        if lease is None:  # cancelled before the thread got here
            return
        context = contextvars.copy_context()

        def lend() -> None:
            if not lease.context.done():
                lease.context.set_result(context)

        self._worker.loop.add_callback(lend)
        lease.ended.wait()

    async def _call_peer(self, address: str, message: Message) -> Message:
        details = dict(message)
        reply: Message = await getattr(self._worker.rpc(address), OPERATION)(**details)
        return reply


HANDLERS = {
    "ship": "ship",
    "run": "run",
    "apply": "apply",
    "fetch": "fetch",
    "blob names": "blob_names",
    "forget": "forget",
    "push": "push",
    "abort": "abort",
}


def lease_key(binding: str, incarnation: str, number: int) -> str:
    """The key of a binding's lease task on the worker of that incarnation."""
    return f"{LEASE_PREFIX}|{binding}|{incarnation}|{number}"


def binding_of(key: str) -> str:
    """The binding whose lease task has that key."""
    return key.split("|")[1]


def hold_lease(key: str) -> Sequence[str]:
    """Hold a worker for a binding; the function of the lease task.

    Pinned and seceded, it tells the scheduler that the worker is in use, and of which resources,
    without taking a thread from other tasks.
    """
    host = get_worker().plugins.get(PLUGIN_NAME)
    # A worker that died and came back at the same address has the task but not the workspaces.
    if isinstance(host, WorkspaceHost) and key.split("|")[2] == host.incarnation:
        secede()
        host.hold_lease(key)
    return ()
