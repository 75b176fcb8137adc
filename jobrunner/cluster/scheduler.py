"""A client's link to its scheduler: which workers there are; which join, leave or are lost."""

from __future__ import annotations

import asyncio
import math
import os
import pydoc
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from distributed import Client

from jobrunner._version import __version__
from jobrunner.cluster.placement import WorkerInfo
from jobrunner.config import get_number
from jobrunner.dask_internals import (
    WorkerNews,
    read_news,
    scheduler_identity,
    topic_handlers,
)
from jobrunner.errors import SchedulerLostError
from jobrunner.texts import get_logger, listed
from jobrunner.worker import PING_SECONDS, PLUGIN_NAME

logger = get_logger(__name__)

START_AGAIN = "Start the same command again; it resumes from the last recorded epoch."

SHOWN = 5
"""How many workers an error lists."""

SILENT = "it does not answer"
"""Why a worker is unfit, if it may be asked again."""

_VERSION = "jobrunner.worker.plugin.PLUGIN_NAME"

Listener = Callable[[str, WorkerNews], None]
"""Called with a worker's address, and what became of it."""


class SchedulerLink:
    """A synchronous client's link to its scheduler. Coroutines run on the client's event loop."""

    def __init__(self, client: Client, most_workers: float = math.inf) -> None:
        self.client = client
        self.silence_seconds = get_number("worker-silence-seconds")
        self.most_workers = most_workers  # that the cluster ever has

    # ---- the scheduler

    def check_open(self) -> None:
        """Raise a `SchedulerLostError` if the client is closed or lost its scheduler."""
        if self.client.status != "running":
            raise SchedulerLostError(
                f"The client of this session is {self.client.status}, so it cannot reach its "
                f"workers: it was closed, or the scheduler is gone."
            ).advise(f"Connect again. {START_AGAIN}")

    def loss(self, error: OSError) -> SchedulerLostError:
        """The error for a message that Dask could not send by the scheduler."""
        return SchedulerLostError(
            f"Lost the connection to the scheduler of {self.client!r}: {error}."
        ).advise(START_AGAIN)

    async def identity(self, n_workers: int = 0, patience: float = PING_SECONDS) -> dict[str, Any]:
        """The scheduler's description of itself and of `n_workers` workers; -1 for all.

        Raises a `SchedulerLostError` if it does not answer within `patience` seconds.
        """
        try:
            return await asyncio.wait_for(scheduler_identity(self.client, n_workers), patience)
        except (OSError, TimeoutError) as error:
            raise SchedulerLostError(
                f"The scheduler of {self.client!r} did not answer within {patience:g} s "
                f"({type(error).__name__}: {error}): it hangs, is gone, or cannot be reached."
            ).advise(START_AGAIN) from error

    # ---- its workers

    async def workers(self) -> list[WorkerInfo]:
        """The running workers, in order of their names and addresses."""
        identity = await self.identity(-1, max(PING_SECONDS, self.silence_seconds))
        workers = []
        for address, described in identity["workers"].items():
            if described["status"] != "running":
                continue
            try:
                workers.append(_read_worker(address, described))
            except msgspec.ValidationError as error:  # workers say this of themselves
                logger.warning("No nodes on %s, which describes itself wrongly: %s", address, error)
        return sorted(workers, key=lambda worker: (len(worker.name), worker.name, worker.address))

    async def run(
        self,
        function: Callable[..., Any],
        addresses: Collection[str],
        *arguments: Any,
        patience: float,
    ) -> dict[str, Any]:
        """Call a function on workers; returns by address what it returned, or an exception.

        If one stays silent, so does the one message to all: then each gets its own.
        """
        try:
            return await asyncio.wait_for(
                self._broadcast(function, addresses, *arguments), patience
            )
        except TimeoutError:
            patience = min(PING_SECONDS, patience)
            return await self.run_each(function, addresses, *arguments, patience=patience)

    async def run_each(
        self,
        function: Callable[..., Any],
        addresses: Collection[str],
        *arguments: Any,
        patience: float,
    ) -> dict[str, Any]:
        """`run`, with a message to each worker from the start."""

        async def run(address: str) -> Any:
            try:
                running = self._broadcast(function, [address], *arguments)
                return (await asyncio.wait_for(running, patience))[address]
            except OSError as error:
                logger.info("%s did not answer %s: %r", address, function.__name__, error)
                return error

        return dict(zip(addresses, await asyncio.gather(*map(run, addresses)), strict=True))

    async def _broadcast(
        self, function: Callable[..., Any], addresses: Collection[str], *arguments: Any
    ) -> dict[str, Any]:
        running: Any = self.client.run(
            function, *arguments, workers=list(addresses), on_error="return"
        )
        try:
            results: dict[str, Any] = await running
        except OSError as error:
            raise self.loss(error) from error
        return results

    async def find_silent(self, addresses: Collection[str]) -> list[str]:
        """Return those of the workers that do not answer a ping."""
        patience = min(PING_SECONDS, self.silence_seconds)
        answers = await self.run_each(os.getpid, addresses, patience=patience)
        return [address for address, answer in answers.items() if isinstance(answer, BaseException)]

    async def find_unfit(self, addresses: Collection[str]) -> dict[str, str]:
        """Return those of the workers that cannot run nodes, and why: by address.

        Others' workers need not have jobrunner: nothing that they must import is sent to them.
        """
        # Importing the package may take long.
        patience = max(PING_SECONDS, self.silence_seconds)
        answers = await self.run(pydoc.locate, addresses, _VERSION, patience=patience)
        reasons = {address: _reason(answer) for address, answer in answers.items()}
        return {address: reason for address, reason in reasons.items() if reason}

    # ---- news of them

    def watch(self, addresses: Collection[str], listener: Listener) -> None:
        """Call a listener, on the client's event loop, if one of the workers leaves or is lost.

        `EVERY_WORKER` among the addresses: also if one joins the cluster.
        """
        with _lock:
            for address in addresses:
                topic = topic_handlers(self.client).get(address)
                if not isinstance(topic, _Topic):
                    topic = _Topic(address, topic)
                if not topic.listeners:
                    self.client.subscribe_topic(address, topic)
                topic.listeners.append(listener)

    def unwatch(self, addresses: Collection[str], listener: Listener) -> None:
        """Undo `watch`."""
        with _lock:
            for address in addresses:
                topic = topic_handlers(self.client).get(address)
                if not isinstance(topic, _Topic) or listener not in topic.listeners:
                    continue
                topic.listeners.remove(listener)
                if topic.listeners or self.client.status != "running":
                    continue
                if topic.replaced is not None:
                    self.client.subscribe_topic(address, topic.replaced)
                else:
                    self.client.unsubscribe_topic(address)

    def forget_watches(self) -> None:
        """Undo every `watch`; a new scheduler has no subscriptions."""
        with _lock:
            for topic in topic_handlers(self.client).values():
                if isinstance(topic, _Topic):
                    topic.listeners.clear()


_lock = threading.Lock()
"""For the topics of all clients."""


class _Topic:
    """Tells all sessions of a client what the scheduler logs under a worker's address, or of all.

    A client has one handler of a topic: this also calls the handler that it replaces.
    """

    def __init__(self, name: str, replaced: Callable[[Any], Any] | None) -> None:
        self._name = name
        self.replaced = replaced
        self.listeners: list[Listener] = []

    def __call__(self, event: tuple[float, Any]) -> Any:
        news = read_news(self._name, event)
        if news is not None:
            for listener in tuple(self.listeners):
                listener(*news)
        if self.replaced is None:
            return None
        return self.replaced(event)


def _read_worker(address: str, described: Mapping[str, Any]) -> WorkerInfo:
    limit_bytes = 0
    if described["nanny"]:
        limit_bytes = described["memory_limit"] or 0
    fields = {
        "address": address,
        "name": str(described["name"]),
        "host": described["host"],
        "nthreads": described["nthreads"],
        "resources": described["resources"],
        "limit_bytes": limit_bytes,
    }
    return msgspec.convert(fields, WorkerInfo)


def _reason(answer: object) -> str:
    """Why nodes cannot run on a worker, given what it has under `_VERSION`; empty if they can."""
    if answer == PLUGIN_NAME:
        return ""
    if isinstance(answer, OSError):
        return SILENT
    if answer is None:
        return "jobrunner is not installed there"
    if isinstance(answer, BaseException):
        return f"jobrunner cannot be imported there: {answer}"
    return f"another version of jobrunner is there (expected {PLUGIN_NAME!r}, found {answer!r})"


def describe_unfit(unfit: Mapping[str, str]) -> str:
    """Name workers that cannot run nodes, by address, with the reasons."""
    shown = listed((f"{address}: {reason}" for address, reason in unfit.items()), SHOWN, "; ")
    advice = ""
    if set(unfit.values()) != {SILENT}:
        advice += f" To use them, install jobrunner {__version__} there and restart them."
    if SILENT in unfit.values():
        advice += " Check what blocks those that do not answer."
    return f"{len(unfit)} of the cluster's workers cannot run nodes ({shown}).{advice}"
