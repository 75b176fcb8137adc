"""What ``prune``, ``pin``, ``restore``, ``copy`` and ``fsck`` do: as data, and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jobrunner.checkpoint import (
    CheckpointDirectory,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    MultiNodeCheckpointManager,
    Repair,
    RetentionPolicy,
    copy_epoch,
    find_unreported,
    inspect_directory,
    name_reported,
    plan_repair,
    repair_log,
    restore_epoch,
)
from jobrunner.cli.listing import format_table
from jobrunner.cli.progress import format_bytes
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.run import format_ranges

_MOST_ALIKE = 3
_DIGITS = re.compile(r"[0-9a-f]{8,}|\d+")


def read_policy(last: int | None, every: int | None, best: Sequence[str]) -> KeepAny:
    """Join what the options of ``prune`` say.

    Parameters
    ----------
    last, every : int or None
    best : sequence of str
        Each ``METRIC``, ``METRIC:N``, ``METRIC:min`` or ``METRIC:max:N``.

    Raises
    ------
    DefinitionError
        An option is not of that form, or none is given.
    """
    policies: list[RetentionPolicy] = []
    if last is not None:
        policies.append(KeepLast(last))
    if every is not None:
        policies.append(KeepEvery(every))
    for text in best:
        metric, *words = text.split(":")
        modes = [word for word in words if word in ("min", "max")]
        counts = [int(word) for word in words if word.isdecimal()]
        if len(modes) > 1 or len(counts) > 1 or len(words) != len(modes) + len(counts):
            raise DefinitionError(
                f"--keep-best {text}: expected METRIC, METRIC:N, METRIC:max or METRIC:max:N, such "
                f"as loss:min:3."
            )
        count = counts[0] if counts else 1
        policies.append(KeepBest(metric, count, "max" if modes == ["max"] else "min"))
    if not policies:
        raise DefinitionError(
            "Say which epochs to keep: --keep-last N, --keep-every N, --keep-best METRIC; what "
            "any of them keeps is kept."
        )
    return KeepAny(tuple(policies))


def prune(
    path: str, policy: KeepAny, *, dry_run: bool, take_over: bool
) -> tuple[dict[str, Any], str]:
    """Give up what `policy` does not keep.

    Returns
    -------
    data : dict
        ``path``, ``dry_run``, ``retired`` and ``kept`` (epochs), ``pinned``, ``nbytes`` of the
        retired.
    text : str

    Raises
    ------
    DefinitionError
        It goes by a metric that no epoch has, so that nearly all would go.
    CheckpointCorruptError
        The record of an epoch that it would judge, or give up, cannot be read.
    """
    manager = MultiNodeCheckpointManager(path, keep=policy, take_over=take_over)
    _check_records(manager, policy)
    if dry_run or manager.state().number < 0:
        retired = manager.retirable()
        nbytes = _sizes(manager, retired)
    else:
        manager.start_run([], {"command": "prune"})
        try:
            nbytes = _sizes(manager, manager.retirable())
            retired = manager.retire()
        finally:
            manager.end_run()
    gone = set(retired)
    kept = [epoch for epoch in manager.epochs() if epoch not in gone]
    data = {
        "path": manager.path,
        "dry_run": dry_run,
        "retired": retired,
        "kept": kept,
        "pinned": list(manager.pins()),
        "nbytes": nbytes,
    }
    would = "would be " if dry_run else ""
    if not retired:
        return data, f"Nothing {would}given up; {len(kept)} epochs are kept."
    return data, (
        f"{would}given up: {format_ranges(retired)} ({format_bytes(nbytes)})\n"
        f"kept: {format_ranges(kept)}"
    )


def _check_records(manager: MultiNodeCheckpointManager, policy: KeepAny) -> None:
    goes_by_metrics = any(isinstance(part, KeepBest) for part in policy.policies)
    judged = manager.epochs() if goes_by_metrics else manager.retirable()
    metrics = {}
    unreadable: dict[int, CheckpointCorruptError] = {}
    for epoch, record in manager.records(judged):
        if isinstance(record, CheckpointCorruptError):
            unreadable[epoch] = record
        else:
            metrics[epoch] = record["details"].get("metrics", {})
    if unreadable:
        which = f"records of epochs {format_ranges(list(unreadable))}"
        if len(unreadable) == 1:
            which = f"record of epoch {next(iter(unreadable))}"
        first = next(iter(unreadable.values()))
        raise CheckpointCorruptError(
            f"Nothing is given up in {manager.path}, for the {which} cannot be read: {first}",
            path=first.path,
        ) from first
    names = find_unreported(policy, metrics) if metrics else []
    if names:
        raise DefinitionError(
            f"No epoch of {manager.path} has reported {names[0]!r}, so --keep-best would keep the "
            f"newest only; reported are: {name_reported(metrics)}."
        )


def _sizes(manager: CheckpointDirectory, epochs: Sequence[int]) -> int:
    nbytes = 0
    for _, record in manager.records(epochs):
        if isinstance(record, CheckpointCorruptError):
            raise record
        nbytes += sum(about["nbytes"] for about in record["stores"].values())
    return nbytes


def pin(manager: CheckpointDirectory, epoch: int, label: str) -> tuple[dict[str, Any], str]:
    """Pin an epoch; data and text tell all its pins."""
    manager.pin(epoch, label)
    labels = manager.pins().get(epoch, [])
    data = {"path": manager.path, "epoch": epoch, "pins": labels}
    return data, f"Epoch {epoch} is pinned: {', '.join(labels)}."


def unpin(
    manager: CheckpointDirectory, epoch: int, label: str | None
) -> tuple[dict[str, Any], str]:
    """Unpin an epoch; data and text tell the pins that are left."""
    was_pinned = manager.unpin(epoch, label)
    labels = manager.pins().get(epoch, [])
    data = {"path": manager.path, "epoch": epoch, "was_pinned": was_pinned, "pins": labels}
    if not was_pinned:
        return data, f"Epoch {epoch} was not pinned{'' if label is None else f' as {label}'}."
    left = f"still pinned: {', '.join(labels)}" if labels else "no longer pinned"
    return data, f"Epoch {epoch} is {left}."


def restore(
    manager: CheckpointDirectory, epoch: int, number: int | None, *, take_over: bool
) -> tuple[dict[str, Any], str]:
    """Record an epoch again that was set aside."""
    record = restore_epoch(manager, epoch, number, take_over=take_over)
    stores = {node: about["store"] for node, about in manager.record(epoch)["stores"].items()}
    data = {"path": manager.path, "epoch": epoch, "commit": record.number, "stores": stores}
    return data, f"Epoch {epoch} of {manager.path} is recorded again, as {record.time} saved it."


def copy(
    manager: CheckpointDirectory,
    epochs: Sequence[int],
    target: str,
    *,
    is_all: bool = False,
    take_over: bool,
) -> tuple[dict[str, Any], str]:
    """Record epochs in another directory as well.

    `is_all`: they are all that are recorded, and one that a run gives up meanwhile is left out.

    Raises
    ------
    CheckpointNotFoundError
        There is no epoch to copy, or one that was asked for is not recorded.
    """
    copied: list[int] = []
    gone: list[int] = []
    for epoch in epochs:
        try:
            copy_epoch(manager, epoch, target, take_over=take_over)
        except CheckpointNotFoundError:
            if not is_all or epoch in manager.epochs():
                raise
            gone.append(epoch)
        else:
            copied.append(epoch)
    if not copied:  # or who backs a directory up would take this for a copy of it
        raise CheckpointNotFoundError(f"No epoch is recorded in {manager.path}.")
    path = CheckpointDirectory(target, None, allow_pickle=False, files=None).path
    data = {"path": manager.path, "target": path, "epochs": copied}
    but = f" (given up meanwhile: {format_ranges(gone)})" if gone else ""
    return data, f"Copied to {path}: {format_ranges(copied)}{but}"


def fsck(
    manager: CheckpointDirectory, *, is_brief: bool
) -> tuple[dict[str, Any], str, CheckpointCorruptError | None]:
    """Explain everything that lies in a directory, and what a repair of its log would do.

    Returns
    -------
    data : dict
        ``path``, ``counts`` by status, ``objects``: each with ``path``, ``status``,
        ``explanation``; and ``repair``, as `repair` tells it, None where none is needed.
    text : str
        What is neither live nor, if `is_brief`, pending or set aside; and the counts.
    error : CheckpointCorruptError or None
        The first damage.
    """
    found = inspect_directory(manager)
    counts = Counter(finding.status for finding in found)
    plan = plan_repair(manager)
    data = {
        "path": manager.path,
        "counts": dict(counts),
        "objects": [
            {"path": f.path, "status": f.status, "explanation": f.explanation} for f in found
        ],
        "repair": None if plan is None else _describe_repair(plan),
    }
    told = ("stray", "damaged") if is_brief else ("stray", "damaged", "pending", "aside")
    rows = _group([(f.status, f.path, f.explanation) for f in found if f.status in told])
    lines = [format_table(rows)] if rows else []
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines.append(f"{manager.path}: {summary or 'nothing is there'}.")
    if plan is not None:
        lines += ["", f"`jobrunner fsck {manager.path} --repair` would do this:"]
        lines += _tell_repair(plan)
    damage = next((f for f in found if f.status == "damaged"), None)
    error = None if damage is None else CheckpointCorruptError(damage.explanation)
    return data, "\n".join(lines), error


def repair(manager: CheckpointDirectory) -> tuple[dict[str, Any], str]:
    """Append the entry from which a log that has lost others can be read again.

    Returns
    -------
    data : dict
        ``path`` and ``repair``: ``lost`` entries, ``kept``, ``rebuilt`` and ``given_up`` epochs,
        ``unproven`` stores; None where there was nothing to repair.
    text : str
    """
    done = repair_log(manager)
    if done is None:
        return {"path": manager.path, "repair": None}, f"{manager.path}: nothing to repair."
    data = {"path": manager.path, "repair": _describe_repair(done)}
    return data, "\n".join([f"The log of {manager.path} can be read again.", *_tell_repair(done)])


def _describe_repair(plan: Repair) -> dict[str, Any]:
    return {
        "lost": {str(number): why for number, why in sorted(plan.lost.items())},
        "elsewhere": {str(number): name for number, name in sorted(plan.elsewhere.items())},
        "kept": plan.kept,
        "rebuilt": plan.rebuilt,
        "given_up": {str(epoch): why for epoch, why in sorted(plan.given_up.items())},
        "unproven": plan.unproven,
    }


def _tell_repair(plan: Repair) -> list[str]:
    gone = [number for number in plan.lost if number not in plan.elsewhere]
    lines = [f"epochs that stay recorded: {format_ranges(plan.kept)}"]
    if plan.rebuilt:
        lines.append(
            f"epochs recorded anew, from stores of which every byte was verified: "
            f"{format_ranges(plan.rebuilt)}"
        )
    lines += [
        f"epoch {epoch} is recorded no longer: {why}"
        for epoch, why in sorted(plan.given_up.items())
    ]
    lines += [
        f"entry {number} of the log lies in {name}, and counts"
        for number, name in sorted(plan.elsewhere.items())
    ]
    if gone:
        lines.append(
            f"entries of the log that are lost: {format_ranges(sorted(gone))}. A pin that one of "
            f"them made is lost with it: pin again what must be kept."
        )
    lines += [f"not recorded: {name}: {why}" for name, why in sorted(plan.unproven.items())]
    return [*lines, "Nothing is deleted, moved or written over."]


def _group(rows: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """One row for many that follow one another and differ in numbers only."""
    told = []
    for _, same in groupby(rows, lambda row: (row[0], *(_DIGITS.sub("#", t) for t in row[1:]))):
        group = list(same)
        if len(group) <= _MOST_ALIKE:
            told += group
        else:
            status, path, why = group[0]
            told.append((status, f"{path} ... {group[-1][1]}", f"({len(group)} alike) {why}"))
    return told
