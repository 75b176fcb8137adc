"""Every use of what Dask's documentation does not promise, and every difference between its versions.

``python tests/versions.py`` runs the tests on the lowest, a middle and the newest version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from distributed import Client, Future, LocalCluster, Nanny, Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT

if TYPE_CHECKING:
    from distributed import Worker

Handler = Callable[..., Awaitable[Any]]

CLOSE_SECONDS = 2.0
LEAVING_STATUSES = ("closing_gracefully", "closing")

EVERY_WORKER = "all"
"""The topic of what happens on the whole cluster; others have the address of a worker as their name."""

WorkerNews = Literal["joined", "leaving", "lost"]

# ---- clients and schedulers


class OwnClient(Client):
    """A client that ends its thread if no scheduler answers."""

    def start(self, **kwargs: Any) -> None:
        """Connect."""
        try:
            super().start(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            # Dask closes such a client, but not the thread that it started for it.
            with suppress(Exception):
                self.close(timeout=CLOSE_SECONDS)  # type: ignore[no-untyped-call]
            self._loop_runner.stop()
            raise


async def scheduler_identity(client: Client, n_workers: int) -> dict[str, Any]:
    """The scheduler's description of itself and of at least `n_workers` workers; -1 for all."""
    rpc: Any = client.scheduler
    identity: dict[str, Any] = await rpc.identity(n_workers=n_workers)
    return identity


def broadcaster(client: Client) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
    """A function that sends workers a message, ``(msg={"op": ...}, workers=[...])``, by the scheduler.

    It returns each worker's answer or an exception.
    """
    rpc: Any = client.scheduler
    return partial(rpc.broadcast, on_error="return")


def topic_handlers(client: Client) -> Mapping[str, Callable[[Any], Any]]:
    """What a client calls for the topics that it has subscribed to: one handler for each."""
    handlers: Mapping[str, Callable[[Any], Any]] = client._event_handlers
    return handlers


def read_news(topic: str, event: tuple[float, Any]) -> tuple[str, WorkerNews] | None:
    """The worker that an event of a topic is about, by address, and what became of it, if that matters."""
    message = event[1]
    if not isinstance(message, Mapping):
        return None
    action = message.get("action")
    if topic == EVERY_WORKER:  # each worker's own topic says what becomes of it later
        if action != "add-worker":
            return None
        return str(message.get("worker")), "joined"
    if action == "remove-worker" and not message.get("expected"):
        return topic, "lost"
    if action == "remove-worker" or message.get("status") in LEAVING_STATUSES:
        return topic, "leaving"
    return None


async def adopted_futures(
    client: Client, sizes_by_worker: Mapping[str, Mapping[str, int]]
) -> dict[str, Future[Any]]:
    """Make futures of what workers `hold`: address -> key -> size. As `Client.scatter` does."""
    rpc: Any = client.scheduler
    addresses: dict[str, list[str]] = {}
    nbytes: dict[str, int] = {}
    for address, sizes in sizes_by_worker.items():
        addresses |= {key: [address] for key in sizes}
        nbytes |= sizes
    await rpc.update_data(who_has=addresses, nbytes=nbytes, client=client.id)
    return {key: Future(key, client) for key in nbytes}


def dashboard_template() -> Any:
    """The template of Dask's own pages, with their navigation."""
    from distributed.dashboard.components.scheduler import env  # slow to import

    return env.get_template("simple.html")


def add_dashboard_pages(pages: Mapping[str, Callable[..., None]]) -> None:
    """Let dashboards that are made later in this process have more pages, by path."""
    from distributed.dashboard import scheduler  # slow to import

    scheduler.applications.update(pages)


# ---- local clusters


def nanny_class(started: list[Nanny], is_over: Callable[[], bool]) -> type[Nanny]:
    """A class of nannies that are in `started` from the beginning, and start nothing when over."""

    class OwnNanny(Nanny):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

        async def instantiate(self) -> Status:
            if is_over():
                return Status.failed
            return await super().instantiate()

        async def _on_worker_exit(self, exitcode: Any) -> None:
            # Older versions restart a worker that exits while it starts again and again.
            if self.status not in (Status.init, Status.starting):
                await super()._on_worker_exit(exitcode)

    return OwnNanny


def count_workers(cluster: LocalCluster) -> int:
    """How many workers a local cluster has, those that start included."""
    return len(cluster.worker_spec)


# ---- workers


def find_plugin(worker: Worker, name: str) -> object:
    """The plugin of that name, or None."""
    return worker.plugins.get(name)


async def add_plugin(worker: Worker, name: str, plugin: WorkerPlugin) -> None:
    """Add a plugin to this worker, and not to all workers as `Client.register_plugin` does."""
    await worker.plugin_add(plugin, name=name, catch_errors=False)


def remove_plugin(worker: Worker, name: str) -> None:
    """Remove a plugin without calling its `teardown`."""
    del worker.plugins[name]


def handle(worker: Worker, operation: str, handler: Handler | None) -> None:
    """Let a handler answer messages of an operation; None removes it."""
    if handler is None:
        worker.handlers.pop(operation, None)
    else:
        worker.handlers[operation] = handler


async def call_worker(
    worker: Worker, address: str, operation: str, message: Mapping[str, Any]
) -> Any:
    """Send a message from a worker to another one; returns the answer."""
    return await getattr(worker.rpc(address), operation)(**message)


def hold(worker: Worker, values: dict[Any, Any]) -> dict[str, int]:
    """Put values into Dask's memory on a worker, under keys; returns their sizes. For `adopted_futures`."""
    sizes: dict[str, int] = worker.update_data(data=values)["nbytes"]
    return sizes


def is_retiring(worker: Worker) -> bool:
    """Whether a worker closes as asked, and not because it lost its scheduler."""
    return worker.status == Status.closing and not worker.batched_stream.closed()


def thread_count(worker: Worker) -> int:
    """How many threads run a worker's tasks."""
    return int(worker.state.nthreads)


def memory_reader(worker: Worker) -> Callable[[], int]:
    """A function that returns how many bytes a worker's process uses."""
    reader: Callable[[], int] = worker.monitor.get_process_memory
    return reader


def deadly_bytes(worker: Worker) -> int:
    """The use of memory at which a worker's nanny kills it; 0 if nothing does."""
    return int((worker.nanny and worker.memory_manager.memory_limit) or 0)


def machine_bytes() -> int:
    """How much memory this machine has, or the container that the process is in."""
    return int(MEMORY_LIMIT)
