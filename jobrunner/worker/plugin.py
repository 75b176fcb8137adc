"""The Dask plugin that hosts bindings on a worker, and the lease tasks that keep them alive."""

from __future__ import annotations

import asyncio
import contextvars
import re
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import get_worker, secede
from distributed.diagnostics.plugin import WorkerPlugin

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
from jobrunner.worker.hosted_nodes import (
    BindingContext,
    BindingOptions,
    HostedNodes,
    failed_reply,
)
from jobrunner.worker.memory import MemoryLimit
from jobrunner.worker.messages import (
    OPERATION,
    PROTOCOL_VERSION,
    AbortMessage,
    AnyMessage,
    ApplyMessage,
    BindingMessage,
    Message,
    OperationMessage,
    PushMessage,
    ReleaseMessage,
    RunMessage,
)

if TYPE_CHECKING:
    from distributed import Worker

logger = get_logger(__name__)

PLUGIN_NAME = f"jobrunner-{PROTOCOL_VERSION}"
_LEASE_KEY = re.compile(rf"lease-{PLUGIN_NAME}\|[^|]*\|[^|]*\|[^|]*")

EXPECT_SECONDS = 60.0
"""How long a worker stays ready for a binding that is about to come."""

LINGER_SECONDS = 2.0
"""How long a plugin without bindings still answers late messages, before it removes itself."""

MOST_PINGS = 64
"""How many other workers a worker pings at the same time."""

CLOSE_SECONDS = 2.0
"""How long a release waits for a binding's threads to end."""


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
        self._leases: dict[str, threading.Event] = {}  # running lease tasks; set: they end
        self._hosting = asyncio.Event()  # set and cleared whenever a lease has begun
        self._expected: dict[str, float] = {}  # bindings that are about to come, and until when
        self._own_switch_seconds = 0.0  # the process's switch interval, while it is changed
        handle(worker, OPERATION, self.call)

    async def teardown(self, worker: Worker) -> None:
        """Drop everything; a worker that is retired first lets its nodes move to other workers."""
        moving = [hosted for hosted in self.bindings.values() if hosted.options.can_move]
        if moving and is_retiring(worker):
            logger.info("Worker %s stays until its nodes have moved elsewhere", worker.address)
            moves = asyncio.gather(*(hosted.ended.wait() for hosted in moving))
            with suppress(TimeoutError):
                await asyncio.wait_for(moves, get_number("departure-seconds"))
        handle(worker, OPERATION, None)
        self._expected.clear()
        for binding in {*self.bindings, *map(binding_of, self._leases)}:
            self._drop(binding, "its worker closed")

    # ---- messages

    async def call(self, **message: Any) -> Message:
        """Handle a message from a client or another worker; a failure is returned, not raised.

        One for a binding, or with a `lease`, that is about to come is answered "waiting": send it
        again.
        """
        try:
            request = msgspec.convert(message, AnyMessage)
        except msgspec.ValidationError as error:  # it may come from anyone
            logger.error("Message %.80r is not understood: %s", message.get("call"), error)
            return failed_reply(
                ExecutionError(
                    f"Worker {self._worker.address} got a message {message.get('call')!r:.80} that "
                    f"it does not understand: {error}. Run the same version of jobrunner on the "
                    f"client and on all workers."
                )
            )
        binding = request.binding
        if isinstance(request, ReleaseMessage):
            return await self._release(binding)
        hosted = self.bindings.get(binding)
        # The client's message may overtake the lease task, which Dask starts when it has a thread and
        # the resources.
        if (hosted is None or request.lease) and self._is_to_come(request):
            self.expect(binding)
            seconds = 0.0
            if isinstance(request, OperationMessage):
                seconds = request.wait_seconds
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hosting.wait(), seconds)
            if self._is_to_come(request):
                return {"status": "waiting"}
            hosted = self.bindings.get(binding)
        if hosted is None:
            return {"status": "unknown"}
        try:
            return await _METHODS[type(request)](hosted, request)
        except Exception as error:
            logger.exception("Message %r failed", message.get("call"))
            return failed_reply(error)

    def _is_to_come(self, request: BindingMessage) -> bool:
        if request.binding in self.bindings:
            return bool(request.lease) and request.lease not in self._leases
        return request.binding in self._expected

    async def _release(self, binding: str) -> Message:
        hosted = self.bindings.get(binding)
        self._drop(binding, "the session released it")
        if hosted is None:
            return {"status": "unknown"}
        with suppress(TimeoutError):
            await asyncio.wait_for(hosted.ended.wait(), CLOSE_SECONDS)
        self._leave()
        return {"status": "done"}

    # ---- how long bindings and the plugin stay

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Follow the lease tasks' states. Dask calls this before their threads run."""
        if not (isinstance(key, str) and _LEASE_KEY.fullmatch(key)):
            return
        if finish == "executing" and key not in self._leases:
            self._leases[key] = threading.Event()
        elif key in self._leases and finish not in ("executing", "long-running"):
            self._drop(binding_of(key), "its client released it or disconnected")

    def run_lease(self, key: str, options: BindingOptions) -> None:
        """Host the binding, whose tasks run in this thread's context, until the lease ends."""
        ended = self._leases.get(key)
        if ended is not None:  # else it was cancelled before this thread started
            context = contextvars.copy_context()
            self._loop.call_soon_threadsafe(self._host, key, options, context)
            ended.wait()

    def _host(self, key: str, options: BindingOptions, task_context: contextvars.Context) -> None:
        worker, binding = self._worker, binding_of(key)
        if key not in self._leases:  # cancelled meanwhile
            return
        if binding not in self.bindings:  # else this lease is for more resources
            self._switch_sooner()
            limit = MemoryLimit(
                worker.address,
                memory_reader(worker),
                # Without a nanny, nothing kills the process, and others may share it.
                limit_bytes=deadly_bytes(worker),
                share=get_number("memory-share"),
            )
            context = BindingContext(
                name=binding,
                options=options,
                address=worker.address,
                nthreads=thread_count(worker),
                call_peer=partial(call_worker, worker),
                memory_limit=limit,
            )
            self._expected.pop(binding, None)
            self.bindings[binding] = HostedNodes(context, task_context)
        self._hosting.set()
        self._hosting.clear()

    def expect(self, binding: str) -> None:
        """Stay until a binding comes, for a while."""
        if binding not in self.bindings:
            self._expected[binding] = self._loop.time() + self._expect_seconds
            self._loop.call_later(self._expect_seconds, self._leave)

    def _leave(self) -> None:
        """Remove the plugin from its worker, unless it is in use."""
        now = self._loop.time()
        self._expected = {name: until for name, until in self._expected.items() if until > now}
        is_in_use = self.bindings or self._leases or self._expected
        if not is_in_use and find_plugin(self._worker, PLUGIN_NAME) is self:
            remove_plugin(self._worker, PLUGIN_NAME)
            handle(self._worker, OPERATION, None)

    def _drop(self, binding: str, reason: str) -> None:
        self._expected.pop(binding, None)
        hosted = self.bindings.pop(binding, None)
        if hosted is not None:
            hosted.close(reason)
            if not self.bindings and self._own_switch_seconds:
                sys.setswitchinterval(self._own_switch_seconds)
                self._own_switch_seconds = 0.0
        for key in [key for key in self._leases if binding_of(key) == binding]:
            self._leases.pop(key).set()
        self._loop.call_later(self._linger_seconds, self._leave)

    def _switch_sooner(self) -> None:
        """Shorten the time for which a busy thread may delay the event loop."""
        seconds = get_number("switch-seconds")
        # Without a nanny, others may share the process.
        if seconds and self._worker.nanny and not self._own_switch_seconds:
            self._own_switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(seconds, self._own_switch_seconds))


_METHODS: dict[type, Callable[[HostedNodes, Any], Awaitable[Message]]] = {
    RunMessage: HostedNodes.run,
    ApplyMessage: HostedNodes.apply,
    PushMessage: HostedNodes.push,
    AbortMessage: HostedNodes.abort,
}


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


def lease_key(binding: str, incarnation: str, number: int) -> str:
    """The key of a binding's lease task on the worker whose host has that incarnation."""
    return f"lease-{PLUGIN_NAME}|{binding}|{incarnation}|{number}"


def binding_of(key: str) -> str:
    """The binding of a lease task."""
    return key.split("|")[1]


def run_lease(key: str, options: BindingOptions) -> Sequence[str]:
    """Reserve a worker for a binding, and host that; the function of the lease task.

    The scheduler sees that the worker and its resources are in use. As the task secedes, it takes no
    thread from other tasks.
    """
    host = find_plugin(get_worker(), PLUGIN_NAME)
    # A worker that restarted at the same address gets the task again, but lost the workspaces.
    if isinstance(host, WorkspaceHost) and key.split("|")[2] == host.incarnation:
        secede()
        host.run_lease(key, options)
    return ()
