"""Find the nodes and blobs of a job in a checkpoint that may have others. Reads nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jobrunner.checkpoint import EpochRecord, blobs_of
from jobrunner.compile import Plan
from jobrunner.errors import PlanMismatchError
from jobrunner.texts import listed

Key = tuple[str, str]
"""Node and blob."""

Missing = Literal["error", "init"]

START_AFRESH = "start afresh (resume_from_epoch=None, --resume none)"

_MOST_NAMES = 8  # in a message


@dataclass(frozen=True, slots=True)
class Match:
    """Which blobs of a checkpoint a job loads, and what it lacks."""

    loaded: tuple[Key, ...]
    missing: frozenset[Key]
    """What the checkpoint lacks."""
    made: frozenset[Key]
    """Those of `missing` that init tasks make."""
    dropped: tuple[str, ...]
    """What the job does not load, in words."""

    def describe(self) -> str:
        """What the user should know of it; empty if the checkpoint has all that the job has."""
        parts = [f"{name} is made" for name in self.describe_made()]
        parts += [f"{name} is not loaded" for name in self.dropped]
        return listed(parts, _MOST_NAMES, "; ") if parts else ""

    def describe_made(self) -> list[str]:
        """The blobs that the checkpoint lacks, in words, with what else than an init task makes them."""
        made = [_name_blob(*key) for key in sorted(self.made)]
        others = sorted(self.missing - self.made)
        return made + [f"{_name_blob(*key)} by the next epoch" for key in others]


def match(plan: Plan, record: EpochRecord, path: str, missing: Missing) -> Match:
    """Find the blobs that `plan` needs in a checkpoint of the directory `path`.

    Raises `PlanMismatchError` if blobs are missing, and none are to be made.
    """
    recorded = blobs_of(record)
    shared: set[str] = set()  # any node may load them
    for planned, details in (
        (plan.replicated, record.details.replicated),
        (plan.partitions, record.details.partitions),
    ):
        shared.update(planned.keys() & details.keys())
    needed = plan.saved_blobs(record.at)
    loaded: list[Key] = []
    lacking: list[Key] = []
    for node, blobs in needed.items():
        for name in sorted(blobs):
            if name in shared or name in recorded.get(node, ()):
                loaded.append((node, name))
            else:
                lacking.append((node, name))
    if missing == "error":
        lacks = [_name_blob(*key) for key in lacking if key[0] in recorded]
        for node, blobs in needed.items():
            if node not in recorded and not (blobs and blobs <= shared):
                lacks.append(f"node {node!r}")
        if lacks:
            raise PlanMismatchError(
                f"Job {plan.job!r} cannot resume from epoch {record.at} of {path}, which lacks "
                f"{listed(lacks, _MOST_NAMES)}; its nodes are {listed(map(repr, recorded))}. Let init "
                f"tasks make them (missing='init', --missing init), run the job that wrote it, or "
                f"{START_AFRESH}."
            )
    return Match(
        tuple(loaded),
        frozenset(lacking),
        frozenset((node, name) for node, name in lacking if name in plan.initial.get(node, ())),
        tuple(_describe_dropped(recorded, needed, set(loaded), shared)),
    )


def _describe_dropped(
    recorded: Mapping[str, Collection[str]],
    nodes: Collection[str],
    loaded: Collection[Key],
    shared: Collection[str],
) -> Iterator[str]:
    for node, names in recorded.items():
        dropped = [name for name in names if name not in shared and (node, name) not in loaded]
        if node in nodes or len(dropped) < len(names):
            yield from (_name_blob(node, name) for name in dropped)
        elif dropped:
            yield f"node {node!r} ({', '.join(map(repr, dropped))})"
        else:
            yield f"node {node!r}"


def _name_blob(node: str, name: str) -> str:
    return f"blob {name!r} of node {node!r}"
