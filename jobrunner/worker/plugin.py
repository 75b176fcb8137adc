"""The Dask plugin that hosts bindings on a worker, and the lease tasks that keep them alive."""

from __future__ import annotations

import asyncio
import contextvars
import re
import secrets
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import get_worker, secede
from distributed.diagnostics.plugin import WorkerPlugin
from msgspec import structs

from jobrunner.config import get_number
from jobrunner.dask_internals import (
    add_plugin,
    call_worker,
    deadly_bytes,
    find_plugin,
    handle,
    is_retiring,
    memory_reader,
    remove_plugin,
    thread_count,
)
from jobrunner.errors import ExecutionError
from jobrunner.texts import get_logger
from jobrunner.worker.calls import Seconds, calls
from jobrunner.worker.group_runs import BindingContext
from jobrunner.worker.hosted_nodes import HostedNodes, failed_reply
from jobrunner.worker.memory import MemoryLimit
from jobrunner.worker.outbox import Message

if TYPE_CHECKING:
    from distributed import Worker

logger = get_logger(__name__)

# Increase it with every change of the messages: a client then leaves out workers of other versions.
PROTOCOL_VERSION = 9
PLUGIN_NAME = f"jobrunner-{PROTOCOL_VERSION}"
OPERATION = f"jobrunner_call_{PROTOCOL_VERSION}"
_LEASE_KEY = re.compile(rf"[^|]*-{PLUGIN_NAME}\|[^|]*\|[^|]*\|[^|]*")

EXPECT_SECONDS = 60.0
"""How long a worker stays ready for a binding that is about to come."""

LINGER_SECONDS = 2.0
"""How long a plugin without bindings still answers late messages, before it removes itself."""

MOST_PINGS = 64
"""How many other workers a worker pings at the same time."""

CLOSE_SECONDS = 2.0
"""How long a release waits for a binding's threads to end."""


@dataclass(frozen=True, slots=True)
class _Lease:
    context: Future[contextvars.Context] = field(default_factory=Future)
    ended: threading.Event = field(default_factory=threading.Event)


class WorkspaceHost(WorkerPlugin):
    """Hosts the bindings of all sessions on one worker. Runs on the worker's event loop.

    A binding lives as long as its lease task: when the client releases it or disconnects, Dask
    cancels the task, and `transition` drops the binding. The scheduler does not know the plugin, or
    it would send it to workers without jobrunner: `host` installs it, and it removes itself.
    """

    def __init__(
        self, expect_seconds: float = EXPECT_SECONDS, linger_seconds: float = LINGER_SECONDS
    ) -> None:
        self._expect_seconds, self._linger_seconds = expect_seconds, linger_seconds

    def setup(self, worker: Worker) -> None:
        """Start to handle messages."""
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self.incarnation = secrets.token_hex(8)
        self.bindings: dict[str, HostedNodes] = {}
        self._leases: dict[str, _Lease] = {}
        self._lease_began = asyncio.Event()  # set and cleared whenever a lease begins
        self._own_switch_seconds = 0.0  # the process's switch interval, while it is changed
        self._expected: dict[str, asyncio.TimerHandle] = {}  # binding -> gives up
        handle(worker, OPERATION, self.call)

    async def teardown(self, worker: Worker) -> None:
        """Drop everything; a worker that is retired first lets its nodes move to other workers."""
        moving = [hosted for hosted in self.bindings.values() if hosted.can_move]
        if moving and is_retiring(worker):
            logger.info("Worker %s stays until its nodes have moved elsewhere", worker.address)
            moves = asyncio.gather(*(hosted.ended.wait() for hosted in moving))
            with suppress(TimeoutError):
                await asyncio.wait_for(moves, get_number("departure-seconds"))
        handle(worker, OPERATION, None)
        for name in list(self._expected):
            self._stop_expecting(name)
        for name in list(self.bindings):
            self._drop(name, "its worker closed")
        for key in list(self._leases):
            self._end_lease(key)

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Follow the lease tasks' states. Dask calls this before their threads run."""
        if not (isinstance(key, str) and _LEASE_KEY.fullmatch(key)):
            return
        if finish == "executing" and key not in self._leases:
            self._leases[key] = _Lease()
            self._lease_began.set()
            self._lease_began.clear()
        elif start in ("executing", "long-running") and finish != "long-running":
            self._end_lease(key)

    async def call(self, call: str, binding: str = "", **details: Any) -> Message:
        """Handle a message from a client or another worker; a failure is returned, not raised."""
        try:
            owner: object = self
            handler = _OWN_CALLS.get(call)
            if handler is not None:
                details["binding"] = binding
            else:
                owner, handler = self.bindings.get(binding), _CALLS.get(call)
                if owner is None:
                    return {"status": "unknown"}
                if handler is None:
                    raise TypeError(f"expected one of {', '.join([*_OWN_CALLS, *_CALLS])}")
            method, schema = handler
            arguments = structs.asdict(msgspec.convert(details, schema))
        except (TypeError, msgspec.ValidationError) as error:  # it may come from anyone
            logger.error(
                "Message %.80r of binding %.80r is not understood: %s", call, binding, error
            )
            return failed_reply(
                ExecutionError(
                    f"Worker {self._worker.address} got a message {call!r:.80} that it does not "
                    f"understand: {error}. Run the same version of jobrunner on the client and on "
                    f"all workers."
                )
            )
        try:
            return await method(owner, **arguments)
        except Exception as error:
            logger.exception("Message %r of binding %s failed", call, binding)
            return failed_reply(error)

    async def hello(self, binding: str = "") -> Message:
        """Say which incarnation this is."""
        return {"status": "done", "incarnation": self.incarnation}

    async def bind(
        self,
        binding: str,
        leases: Mapping[str, str],
        wait_seconds: Seconds,
        job: str,
        seed: int,
        attempt: int,
        can_move: bool,
        silence_seconds: Seconds,
    ) -> Message:
        """Host a binding, once its lease task runs here."""
        worker = self._worker
        if binding not in self.bindings:
            self.expect(binding)
        key = leases.get(worker.address, "")
        lease = self._leases.get(key)
        if lease is None:  # Dask has not started it yet
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lease_began.wait(), wait_seconds)
            lease = self._leases.get(key)
        if lease is not None:
            await asyncio.wait((asyncio.wrap_future(lease.context),), timeout=wait_seconds)
        if lease is None or key not in self._leases or not lease.context.done():
            return {"status": "running", "tasks": []}
        if binding not in self.bindings:
            self._switch_sooner()
            context = BindingContext(
                name=binding,
                address=worker.address,
                nthreads=thread_count(worker),
                call_peer=self._call_peer,
                memory_limit=MemoryLimit(
                    worker.address,
                    memory_reader(worker),
                    # Without a nanny, nothing kills the process, and others may share it.
                    limit_bytes=deadly_bytes(worker),
                    share=get_number("memory-share"),
                ),
                job=job,
                seed=seed,
                attempt=attempt,
                can_move=can_move,
                silence_seconds=silence_seconds,
            )
            self._stop_expecting(binding)
            self.bindings[binding] = HostedNodes(context, lease.context.result())
        return {"status": "done"}

    def expect(self, binding: str) -> None:
        """Stay until a binding comes, for a while."""
        self._stop_expecting(binding)
        timer = self._loop.call_later(self._expect_seconds, self._stop_expecting, binding)
        self._expected[binding] = timer

    def _stop_expecting(self, binding: str) -> None:
        timer = self._expected.pop(binding, None)
        if timer is not None:
            timer.cancel()
            self._leave_later()

    def _leave_later(self) -> None:
        self._loop.call_later(self._linger_seconds, self._leave)

    def _leave(self) -> None:
        """Remove the plugin from its worker, unless it is in use."""
        is_in_use = self.bindings or self._leases or self._expected
        if not is_in_use and find_plugin(self._worker, PLUGIN_NAME) is self:
            remove_plugin(self._worker, PLUGIN_NAME)
            handle(self._worker, OPERATION, None)

    async def release(self, binding: str) -> Message:
        """Drop a binding."""
        hosted = self.bindings.get(binding)
        self._stop_expecting(binding)
        if hosted is None:
            return {"status": "unknown"}
        self._drop(binding, "the session released it")
        with suppress(TimeoutError):
            await asyncio.wait_for(hosted.ended.wait(), CLOSE_SECONDS)
        self._leave()
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
        self._leave_later()

    def _switch_sooner(self) -> None:
        """Shorten the time for which a busy thread may delay the event loop."""
        seconds = get_number("switch-seconds")
        # Without a nanny, others may share the process.
        if seconds and self._worker.nanny and not self._own_switch_seconds:
            self._own_switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(seconds, self._own_switch_seconds))

    def _end_lease(self, key: str) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.ended.set()
            lease.context.cancel()
            self._drop(binding_of(key), "its client released it or disconnected")

    def run_lease(self, key: str) -> None:
        """Pass this thread's context to the binding, and block until the lease ends."""
        lease = self._leases.get(key)
        if lease is None:  # cancelled before this thread started
            return
        with suppress(InvalidStateError):  # cancelled meanwhile
            lease.context.set_result(contextvars.copy_context())
        lease.ended.wait()

    async def _call_peer(self, address: str, message: Message) -> Message:
        reply: Message = await call_worker(self._worker, address, OPERATION, message)
        return reply


_OWN_CALLS = calls(WorkspaceHost.hello, WorkspaceHost.bind, WorkspaceHost.release)
_CALLS = calls(
    HostedNodes.ship,
    HostedNodes.run,
    HostedNodes.apply,
    HostedNodes.blob_names,
    HostedNodes.forget,
    HostedNodes.push,
    HostedNodes.abort,
)


async def host(binding: str, dask_worker: Worker) -> str:
    """Make a worker ready for a binding that is about to come; returns its incarnation."""
    plugin = find_plugin(dask_worker, PLUGIN_NAME)
    if not isinstance(plugin, WorkspaceHost):
        plugin = WorkspaceHost()
        await add_plugin(dask_worker, PLUGIN_NAME, plugin)
    plugin.expect(binding)
    return plugin.incarnation


async def find_cut(
    addresses: Collection[str], wait_seconds: float, dask_worker: Worker
) -> list[str]:
    """Ping other workers from one; returns those that do not answer."""
    slots = asyncio.Semaphore(MOST_PINGS)
    cut: list[str] = []

    async def ping(address: str) -> None:
        async with slots:
            try:
                ping = call_worker(dask_worker, address, "identity", {})
                await asyncio.wait_for(ping, wait_seconds)
            except (OSError, TimeoutError):
                cut.append(address)

    await asyncio.gather(*(ping(a) for a in addresses if a != dask_worker.address))
    return cut


def lease_key(binding: str, incarnation: str, number: int, title: str = "lease") -> str:
    """The key of a binding's lease task on the worker whose host has that incarnation.

    Dask's pages show the tasks under its `title`.
    """
    return f"{title.replace('|', '/')}-{PLUGIN_NAME}|{binding}|{incarnation}|{number}"


def binding_of(key: str) -> str:
    """The binding of a lease task."""
    return key.split("|")[1]


def run_lease(key: str) -> Sequence[str]:
    """Reserve a worker for a binding; the function of the lease task.

    The scheduler sees that the worker and its resources are in use. As the task secedes, it takes no
    thread from other tasks.
    """
    host = find_plugin(get_worker(), PLUGIN_NAME)
    # A worker that restarted at the same address gets the task again, but lost the workspaces.
    if isinstance(host, WorkspaceHost) and key.split("|")[2] == host.incarnation:
        secede()
        host.run_lease(key)
    return ()
