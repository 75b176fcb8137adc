"""What the scheduler knows of the runs of its clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, TypedDict

import msgspec
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from jobrunner.texts import printable
from jobrunner.view import IS_SHOWN, RUNS

MOST_METRICS = 1000
"""Of a run, which are drawn."""

_MOST = (1 << 63) - 1  # an int of Dask's messages
_Number = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)] | float
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]


class _UnderWay(TypedDict):
    group: str
    epoch: _Count | None
    seconds: _Seconds
    tasks: list[str]


class _Saving(TypedDict):
    epoch: _Count
    step: _Count
    seconds: _Seconds


class _Saved(TypedDict):
    epoch: _Count | str
    nbytes: _Count


class _Node(TypedDict):
    node: str
    worker: str
    does: str
    task: str | None
    ended: _Count
    tasks: _Count
    saved_bytes: _Count | None


class _Known(TypedDict):
    """What `RunState.to_dict` gives, as far as it is shown here, and when that was."""

    job: str
    phase: str
    epoch: _Count
    total_epochs: _Count | None
    step: _Count
    steps_per_epoch: _Count | None
    seconds: _Seconds
    epoch_seconds: _Seconds
    save_seconds: _Seconds
    eta_seconds: _Seconds | None
    metrics: dict[str, bool | _Number | str]
    under_way: _UnderWay | None
    saving: _Saving | None
    saved: _Saved | None
    saves: _Count
    failed_saves: _Count
    nodes: list[_Node]
    losses: _Count
    recoveries: _Count
    warnings: list[str]
    stop_asked: str
    error: str
    time: _Seconds


def running(scheduler: Scheduler) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the last state of each run, in the order in which they began.

    Any client may write what it likes there: what has another form is left out.
    """
    clients = scheduler.get_metadata([RUNS], default={})
    for runs in clients.values() if isinstance(clients, Mapping) else ():
        for name, told in runs.items() if isinstance(runs, Mapping) else ():
            try:
                known = msgspec.convert(told, _Known)
            except (msgspec.ValidationError, UnicodeError):
                continue
            metrics = dict(islice(known["metrics"].items(), MOST_METRICS))
            yield printable(str(name)), {**known, "metrics": metrics}


def seconds_since(known: Mapping[str, Any]) -> float:
    """How long ago a state was told."""
    return max(0.0, time.time() - float(known["time"]))


class Forgets(SchedulerPlugin):
    """Forgets the runs of clients that are gone."""

    name = "jobrunner-dashboard"

    def __init__(self, scheduler: Scheduler) -> None:
        scheduler.set_metadata([IS_SHOWN], value=True)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget those of one client."""
        scheduler.get_metadata([RUNS], default={}).pop(client, None)
