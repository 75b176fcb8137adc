"""Load what was decided into workspaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jobrunner.checkpoint import (
    Directory,
    load_group,
    load_waiting_states,
    plan_load,
    with_contents,
)
from jobrunner.cluster import Binding, Session
from jobrunner.config import get_number
from jobrunner.define import Blob
from jobrunner.errors import BlobNotFoundError
from jobrunner.names import BlobKey
from jobrunner.positions import Position
from jobrunner.run.matching import name_now
from jobrunner.run.resume import Begin


def load(session: Session, binding: Binding, origin: Directory, begin: Begin) -> None:
    """Load an epoch into workspaces.

    Objects that are saved by their state have it only after `finish_load`. Raises
    `CheckpointCorruptError` if the epoch is damaged, and then no workspace has changed.
    """
    record = begin.record
    binding.check_fit(_whole_stores(begin), f"Epoch {record.at} of {origin.path}")
    loads = plan_load(
        origin,
        record,
        begin.match.sources,
        partitions={name: nodes for name, (_, nodes) in binding.plan.partitions.items()},
        waiting=begin.waiting,
        goes_on=True,
    )
    deadline_seconds = get_number("checkpoint.deadline-seconds")
    with origin.reading(record.at):
        session.run_group(load_group(loads), record.at.epoch, deadline_seconds)


def _whole_stores(begin: Begin) -> dict[str, int]:
    """The bytes on disk of the stores that nodes load whole."""
    record, matched = begin.record, begin.match
    loaded: dict[str, set[BlobKey]] = {}
    for (node, _), source in matched.sources.items():
        loaded.setdefault(node, set()).add(source)
    sizes = {}
    for node, sources in loaded.items():
        home = matched.nodes.get(node, node)
        contents = (record.contents or {}).get(home)
        if contents is not None and sources.issuperset((home, name) for name in contents.blobs):
            sizes[node] = record.stores[home].nbytes
    return sizes


def finish_load(binding: Binding, begin: Begin, run: Callable[[str, int], object]) -> None:
    """Run the init tasks that run again, and give the objects that waited for them their states.

    `run` gets the key of a group and an epoch.
    """
    if begin.waiting or begin.match.new_blobs:
        # Ship all groups at once: objects that their functions share stay shared.
        binding.ship({**binding.plan.groups, "resume": begin.reloads})
    if begin.reloads.slices:
        run("resume", 0)  # as epoch 0: init tasks draw the same random numbers
    if begin.waiting:
        binding.apply(load_waiting_states)


# ---- some blobs alone


def load_blobs(
    directory: Directory,
    epoch: Position,
    wanted: Sequence[str | Blob],
    session: Session,
    rename: Mapping[str, str],
) -> None:
    """See `JobRunner.load_blobs_from_checkpoints`."""
    record = with_contents(directory, directory.record(epoch))
    names = name_now(rename, record, directory.path)
    where = f"Epoch {epoch} of {directory.path}"
    sources = {key: names.sources[key] for key in _find_blobs(names.sources, where, wanted)}
    with session.exclusive(f"The load of epoch {epoch} of {directory.path}"):
        loads = plan_load(directory, record, sources)
        with directory.reading(epoch):
            session.run(load_group(loads))


def _find_blobs(
    present: Mapping[BlobKey, BlobKey], where: str, wanted: str | Blob | Sequence[str | Blob]
) -> list[BlobKey]:
    """The blobs that were asked for; a name stands for every node that has the blob."""
    keys = []
    if isinstance(wanted, str | Blob):
        wanted = [wanted]
    for blob in wanted:
        if isinstance(blob, str):
            blob = Blob(blob)
        matching = [(node, name) for node, name in present if name == blob.name]
        if blob.node is not None:
            matching = [key for key in matching if key == blob.key]
        if not matching:
            names: dict[str, list[str]] = {}
            for node, name in present:
                names.setdefault(node, []).append(name)
            texts = [f"{node}: {', '.join(sorted(blobs))}" for node, blobs in names.items()]
            raise BlobNotFoundError(
                f"{where} has no blob {blob!r}. Its blobs are: {'; '.join(texts)}"
            )
        keys += matching
    return keys
