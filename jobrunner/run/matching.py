"""Find the nodes and blobs of a job in a checkpoint that may have others. Reads nothing.

What the user says of a job that has changed is an `Adaptation`. The records of a run name the
renames that it was given, or that were given before: in those checkpoints they are done, and mean
nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Literal

from jobrunner.checkpoint import Details, EpochRecord, blobs_of
from jobrunner.compile import Plan
from jobrunner.define import Job
from jobrunner.errors import DefinitionError, PlanMismatchError
from jobrunner.names import BlobKey, check_name
from jobrunner.positions import Position
from jobrunner.texts import listed

Blobs = Mapping[str, Collection[str]]
"""Node -> names of blobs."""

Missing = Literal["error", "init"]

START_AFRESH = "start afresh (resume_from_epoch=None, --resume none)"

_EVERY = "*"  # in place of a node
_MOST_NAMES = 8  # in a message


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How a job has changed since its checkpoint; see `JobRunner`."""

    rename: Mapping[str, str] = field(default_factory=dict)
    missing: Missing = "error"

    def lineage(self, details: Details, streams: Mapping[str, str]) -> dict[str, Any]:
        """What later records say of changes; `details` are those of the record that is loaded."""
        before = details.renamed.items()
        # A rename back undoes an earlier one.
        renamed = {old: new for old, new in before if self.rename.get(new) != old}
        renamed.update(self.rename)
        lineage = {"streams": dict(streams), "renamed": renamed}
        return {name: value for name, value in lineage.items() if value}

    def check_start(self, plan: Plan) -> None:
        """Raise `PlanMismatchError` if a run without a checkpoint would record a wrong rename."""
        last = {old: new for old, new in self.rename.items() if new not in self.rename}
        _check_new_names(plan, last, plan.saved_blobs(Position(1)))


def adapt(rename: Mapping[str, str] | None, missing: Missing, job: Job) -> Adaptation:
    """Check these arguments of a `JobRunner`; raises `DefinitionError`."""
    return Adaptation(_read_rename(rename or {}, f"JobRunner of job {job.name!r}"), missing)


def _read_rename(rename: Mapping[str, str], where: str) -> dict[str, str]:
    old_names: dict[str, str] = {}
    for old, new in rename.items():
        (old_node, *old_blob), (new_node, *new_blob) = old.split("/", 1), new.split("/", 1)
        is_pair = len(old_blob) == len(new_blob)
        if not is_pair or (old_node == _EVERY) != (new_node == _EVERY):
            raise DefinitionError(
                f"{where}: rename maps nodes to nodes ('old': 'new'), and blobs to blobs "
                f"('node/old': 'node/new', or '*/old': '*/new' on every node); got {old!r}: {new!r}."
            )
        for blob in (*old_blob, *new_blob):
            check_name(blob, "blob")
        for node in (old_node, new_node):
            check_name(node, "node")
        if old == new:
            continue
        if new in old_names:
            raise DefinitionError(
                f"{where}: rename gives {old_names[new]!r} and {old!r} the same name, {new!r}. Name "
                f"one of them."
            )
        old_names[new] = old
    return {old: new for new, old in old_names.items()}


@dataclass(frozen=True, slots=True)
class Names:
    """What the nodes and blobs of a checkpoint are called now."""

    renamed: Mapping[str, str]
    """The renames that this checkpoint needs."""
    nodes: Mapping[str, str]
    """Node -> the recorded node that it was."""
    sources: Mapping[BlobKey, BlobKey]
    """Node and blob -> the recorded ones."""


def name_now(rename: Mapping[str, str], record: EpochRecord, path: str) -> Names:
    """Name what a checkpoint in the directory `path` has as a job does for which `rename` is given.

    Renames come first, those of one blob before those on every node, then equal names. Raises
    `PlanMismatchError` if a rename names nothing that is recorded.
    """
    recorded = blobs_of(record)
    done = record.details.renamed
    renamed = {old: new for old, new in rename.items() if done.get(old) != new}
    for old, new in renamed.items():
        node, blob = _key(old)
        if not _is_named(old, recorded):
            lacks, kind = f"node {node!r}", "nodes"
            if blob:
                lacks = _name_blob(node, blob)
            if node in recorded:
                kind = "blobs"
            raise PlanMismatchError(
                f"rename={{{old!r}: {new!r}}}: epoch {record.at} of {path} has no {lacks}. Its {kind} "
                f"are {listed(map(repr, recorded.get(node, recorded)))}. Correct or omit it."
            )
    now: dict[str, str] = {}
    for node in recorded:
        # A node whose name another one has now is gone, unless it has a new name itself.
        if node in renamed or node not in renamed.values():
            now[node] = renamed.get(node, node)
    # Several recorded blobs may claim one name. The strongest claim comes last, and has it.
    by_name: dict[BlobKey, BlobKey] = {}
    on_every_node: dict[BlobKey, BlobKey] = {}
    alone: dict[BlobKey, BlobKey] = {}
    for node, blobs in recorded.items():
        for name in blobs:
            new_name = _rename_everywhere(renamed, name)
            if f"{node}/{name}" in renamed:
                alone[_key(renamed[f"{node}/{name}"])] = (node, name)
            elif node in now and new_name != name:
                on_every_node[now[node], new_name] = (node, name)
            elif node in now:
                by_name[now[node], name] = (node, name)
    sources = {**by_name, **on_every_node, **alone}
    return Names(renamed, {new: old for old, new in now.items()}, sources)


def _rename_everywhere(renamed: Mapping[str, str], name: str) -> str:
    """The name that a recorded blob has now, unless it is renamed on its node alone."""
    return _key(renamed.get(f"{_EVERY}/{name}", f"{_EVERY}/{name}"))[1]


@dataclass(frozen=True, slots=True)
class Match:
    """Which blobs of a checkpoint a job loads, from where, and what it lacks."""

    nodes: Mapping[str, str]
    """Node -> the recorded node that it was."""
    sources: Mapping[BlobKey, BlobKey]
    """Node and blob to load -> the recorded ones; of a shared blob, the node that the node was."""
    missing: frozenset[BlobKey]
    """What the checkpoint lacks."""
    new_blobs: frozenset[BlobKey]
    """Those of `missing` that init tasks make."""
    dropped: tuple[str, ...]
    """What the job does not load, in words."""
    renamed: tuple[str, ...]
    """What has another name now, in words."""
    streams: Mapping[str, str]
    """Node -> its first name, if it has another one now: its random stream belongs to that."""
    is_reshaped: bool
    """`rename` or `missing` has an effect."""

    def describe(self) -> str:
        """What the user should know of it; empty if the checkpoint has all that the job has."""
        parts = [f"{name} is loaded" for name in self.renamed]
        parts += [f"{name} is made" for name in self.describe_made()]
        parts += [f"{name} is not loaded" for name in self.dropped]
        if not parts:
            return ""
        return listed(parts, _MOST_NAMES, "; ")

    def describe_made(self) -> list[str]:
        """The blobs that the checkpoint lacks, in words, with what else than an init task makes them."""
        names = [_name_blob(*key) for key in sorted(self.new_blobs)]
        later = sorted(self.missing - self.new_blobs)
        return names + [f"{_name_blob(*key)} by the next epoch" for key in later]


def match(plan: Plan, record: EpochRecord, path: str, adaptation: Adaptation) -> Match:
    """Find the blobs that `plan` needs in a checkpoint.

    Raises `PlanMismatchError` if blobs are missing that nothing makes, or if a rename does not fit.
    """
    needed = plan.saved_blobs(record.at)
    recorded = blobs_of(record)
    names = name_now(adaptation.rename, record, path)
    _check_new_names(plan, names.renamed, needed)
    shared = {  # those that any node can load, whichever had them -> their recorded names
        **_find_shared(plan.replicated, record.details.replicated, names),
        **_find_shared(plan.partitions, record.details.partitions, names),
    }
    sources: dict[BlobKey, BlobKey] = {}
    missing: set[BlobKey] = set()
    for node, blobs in needed.items():
        for name in sorted(blobs):
            source = names.sources.get((node, name))
            if name in shared:
                source = (names.nodes.get(node, node), shared[name])
            if source is None:
                missing.add((node, name))
            else:
                sources[node, name] = source
    new_blobs: set[BlobKey] = set()
    if adaptation.missing == "error":
        _refuse_missing(plan, record, path, names, needed, missing)
    else:
        for node, name in missing:
            if name in plan.initial.get(node, ()):
                new_blobs.add((node, name))
    streams = {}
    for node in needed:
        old = names.nodes.get(node, node)
        first_name = record.details.streams.get(old, old)
        if first_name != node:
            streams[node] = first_name
    used = set(sources.values())
    for old_name in shared.values():
        used.update((node, old_name) for node in recorded)
    kept_nodes = {names.nodes.get(node) for node in needed}
    return Match(
        nodes=names.nodes,
        sources=sources,
        missing=frozenset(missing),
        new_blobs=frozenset(new_blobs),
        dropped=tuple(_describe_dropped(recorded, used, kept_nodes)),
        renamed=tuple(starmap(_describe_rename, names.renamed.items())),
        streams=streams,
        is_reshaped=bool(names.renamed or new_blobs),
    )


def _find_shared(
    planned: Collection[str], recorded: Collection[str], names: Names
) -> dict[str, str]:
    """The shared blobs of one kind that a job has, with the names under which they are recorded."""
    shared: dict[str, str] = {}
    for old in recorded:
        name = _rename_everywhere(names.renamed, old)
        # Of two that have the name now, that which was renamed has it.
        if name in planned and (name != old or name not in shared):
            shared[name] = old
    return shared


def _refuse_missing(
    plan: Plan,
    record: EpochRecord,
    path: str,
    names: Names,
    needed: Blobs,
    missing: Collection[BlobKey],
) -> None:
    lacks = []
    for node, blobs in needed.items():
        lacking = sorted(name for name in blobs if (node, name) in missing)
        if node in names.nodes:
            lacks += [_name_blob(node, name) for name in lacking]
        elif lacking or not blobs:
            lacks.append(f"node {node!r}")
    if not lacks:
        return
    recorded = blobs_of(record)
    raise PlanMismatchError(
        f"Job {plan.job!r} cannot resume from epoch {record.at} of {path}, which lacks "
        f"{listed(lacks, _MOST_NAMES)}; its nodes are {listed(map(repr, recorded))}. Say under "
        f"which names it has them (rename=..., --rename OLD=NEW), let init tasks make them "
        f"(missing='init', --missing init), run the job "
        f"that wrote it, or {START_AFRESH}."
    )


def _check_new_names(plan: Plan, rename: Mapping[str, str], needed: Blobs) -> None:
    """Raise `PlanMismatchError` if a new name is none of `needed`."""
    for old, new in rename.items():
        if not _is_named(new, needed):
            raise PlanMismatchError(
                f"rename={{{old!r}: {new!r}}}: job {plan.job!r} saves no {new!r}. Its nodes are "
                f"{listed(map(repr, needed))}. Correct or omit it."
            )


def _is_named(name: str, blobs: Blobs) -> bool:
    node, blob = _key(name)
    if not blob:
        return node in blobs
    return any(blob in names for owner, names in blobs.items() if node in (_EVERY, owner))


def _key(name: str) -> BlobKey:
    node, _, blob = name.partition("/")
    return node, blob


def _name_blob(node: str, name: str) -> str:
    return f"blob {name!r} of node {node!r}"


def _describe_rename(old: str, new: str) -> str:
    (node, name), (_, new_name) = _key(old), _key(new)
    if not name:
        return f"node {old!r} as {new!r}"
    if node == _EVERY:
        return f"blob {name!r} of every node as {new_name!r}"
    return f"{_name_blob(node, name)} as {_name_blob(*_key(new))}"


def _describe_dropped(
    recorded: Blobs, used: Collection[BlobKey], nodes: Collection[str | None]
) -> Iterator[str]:
    for node, names in recorded.items():
        dropped = [name for name in names if (node, name) not in used]
        if len(dropped) < len(names) or node in nodes:
            yield from (_name_blob(node, name) for name in dropped)
        elif dropped:
            yield f"node {node!r} ({', '.join(map(repr, dropped))})"
        else:
            yield f"node {node!r}"
