"""Commands on a whole directory: ``prune`` and ``fsck``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import EXIT_CODES, CommandOutput, main
from jobrunner.cli.disk import measure
from jobrunner.cli.options import directory_argument, open_directory, take_over_option
from jobrunner.cli.progress import told_while_slow
from jobrunner.cli.run import keep_options, keep_policy
from jobrunner.errors import CheckpointCorruptError, DefinitionError
from jobrunner.positions import Position, format_ranges
from jobrunner.texts import counted, format_bytes, listed

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        Directory,
        EpochRecord,
        KeepAny,
        MultiNodeCheckpointManager,
        Repair,
    )

_MOST_NAMES = 3
_DELETION_SECONDS = 3600.0  # that prune waits; the next run deletes the rest


@main.command("prune")
@directory_argument
@keep_options
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; change nothing.")
@take_over_option
def prune_command(*, directory: str, dry_run: bool, take_over: bool, **keep: Any) -> CommandOutput:
    """Delete the epochs of DIR that no option keeps.

    Always keeps the newest epoch and pinned epochs.

    For example:
        jobrunner prune runs/kmeans --keep-last 3 --dry-run
        jobrunner prune runs/kmeans --keep-every 10 --keep-best loss
    """
    from jobrunner.checkpoint import MultiNodeCheckpointManager

    policy = keep_policy(**keep)
    if policy is None:
        raise DefinitionError(
            "Give at least one of --keep-last N, --keep-every N and --keep-best METRIC. An epoch "
            "stays if any of them keeps it."
        )
    files = open_directory(directory).files
    manager = MultiNodeCheckpointManager(directory, files=files, keep=policy, take_over=take_over)
    return prune(manager, policy, is_dry=dry_run)


def prune(manager: MultiNodeCheckpointManager, policy: KeepAny, *, is_dry: bool) -> CommandOutput:
    """Delete the epochs that the policy of a manager does not keep, or only say which."""
    records = find_retirable(manager, policy)
    stores = {record.at: [store.name for store in record.stores.values()] for record in records}
    num_epochs = counted(len(stores), "epoch")
    with told_while_slow(lambda: f"measuring what {num_epochs} take on the disk"):
        space = measure(manager.directory, chain.from_iterable(stores.values()))
    kept = [at for at in manager.positions() if at not in stores]
    left: list[Position] = []

    def find_left() -> list[Position]:
        """The epochs of which stores are still there."""
        names = set(manager.directory.files.list_names(manager.path))
        return [at for at in stores if names.intersection(stores[at])]

    def describe_progress() -> str:
        num_deleted = len(stores) - len(find_left())
        return f"deleted {num_deleted} of {num_epochs}"

    if records and not is_dry:
        manager.run.start([], {"command": "prune"})
        try:
            manager.retention.retire()
            with told_while_slow(describe_progress):
                manager.retention.sweeper.drain(_DELETION_SECONDS)
        finally:
            manager.run.end()
        left = find_left()
    deleted = [at for at in stores if at not in left]
    nbytes = sum(record.nbytes for record in records if record.at in deleted)
    freed = None
    if space is not None and not left:
        freed = space.freed
    data = {
        "path": manager.path,
        "dry_run": is_dry,
        "retired": list(stores),
        "left": left,
        "kept": kept,
        "pinned": list(manager.pins()),
        "nbytes": nbytes,
        "freed_nbytes": freed,
    }
    verb = "would be deleted" if is_dry else "deleted"
    lines = [f"{verb}: {format_ranges(deleted)} ({format_bytes(nbytes)})"]
    if freed is not None:
        lines.append(f"freed on the disk: {format_bytes(freed)}")
    if left:
        lines.append(f"not deleted yet (the next run tries again): {format_ranges(left)}")
    return CommandOutput(data, [*lines, f"kept: {format_ranges(kept)}"])


def find_retirable(manager: MultiNodeCheckpointManager, policy: KeepAny) -> list[EpochRecord]:
    """The records of the epochs that the policy of a manager would retire.

    Raises CheckpointCorruptError if a record that decides cannot be read, and DefinitionError if no
    epoch has reported a metric.
    """
    from jobrunner.checkpoint import SavedEpoch, best_metrics, find_unreported, name_reported

    retirable = manager.retention.retirable()
    deciding = retirable
    if best_metrics(policy):
        deciding = manager.positions()
    records = {}
    saved = []
    for at, record in manager.directory.records(deciding):
        if isinstance(record, CheckpointCorruptError):
            raise CheckpointCorruptError(
                f"Nothing was deleted in {manager.path}: the record of epoch {at} cannot be read: "
                f"{record}",
                path=record.path,
            ) from record
        records[at] = record
        saved.append(SavedEpoch(at, metrics=record.details.metrics))
    names = find_unreported(policy, saved)
    if saved and names:
        raise DefinitionError(
            f"No epoch of {manager.path} has reported {names[0]!r}, so --keep-best would keep only "
            f"the newest. Reported metrics: {name_reported(saved)}."
        )
    return [records[at] for at in retirable]


@main.command("fsck")
@directory_argument
@click.option(
    "--repair",
    "is_repair",
    is_flag=True,
    help="If log entries are lost, record what the other files prove.",
)
def fsck_command(*, directory: str, is_repair: bool) -> CommandOutput:
    """Explain everything in DIR that is not part of a checkpoint.

    Without --repair, changes nothing and shows what a repair would do. No run may use DIR during a
    repair.

    For example:
        jobrunner fsck runs/kmeans
        jobrunner fsck runs/kmeans --repair
    """
    opened = open_directory(directory)
    if is_repair:
        return repair(opened)
    return inspect(opened)


def inspect(directory: Directory) -> CommandOutput:
    """Explain the objects of a directory, and what a repair would do."""
    from jobrunner.checkpoint import inspect_directory, plan_repair

    findings = inspect_directory(directory)
    counts = Counter(finding.status for finding in findings)
    lines = []
    for status in ("damaged", "stray", "pending", "aside"):
        lines += _join_paths(
            status, [(f.path, f.explanation) for f in findings if f.status == status]
        )
    summary = ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items()))
    summary = summary.replace("live", "in use")
    if findings:
        lines += [
            f"{directory.path}: of its log files and stores, {summary}.",
            f"What the stores contain is not read; `jobrunner verify {directory.path}` does that.",
        ]
    else:
        lines.append(f"{directory.path}: the directory is empty.")
    plan = None
    try:
        plan = plan_repair(directory)
    except CheckpointCorruptError as obstacle:
        lines.append(f"--repair cannot help: {obstacle}")
    if plan is not None:
        lines += ["", f"`jobrunner fsck {directory.path} --repair` would do this:"]
        lines += _tell_repair(plan)
    data = {
        "path": directory.path,
        "counts": dict(counts),
        "objects": [asdict(finding) for finding in findings],
        "repair": _repair_to_json(plan),
    }
    exit_code = 0
    if counts["damaged"]:
        exit_code = EXIT_CODES[CheckpointCorruptError]
    return CommandOutput(data, lines, exit_code)


def repair(directory: Directory) -> CommandOutput:
    """Repair the log of a directory."""
    from jobrunner.checkpoint import repair_log

    done = repair_log(directory)
    lines = [f"{directory.path}: nothing to repair."]
    if done is not None:
        lines = [f"The log of {directory.path} can be read again.", *_tell_repair(done)]
    return CommandOutput({"path": directory.path, "repair": _repair_to_json(done)}, lines)


def _repair_to_json(plan: Repair | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {**asdict(plan), "rebuilt": sorted(plan.rebuilt)}


def _tell_repair(plan: Repair) -> list[str]:
    lines = [f"epochs that stay recorded: {format_ranges(plan.kept)}"]
    if plan.rebuilt:
        lines.append(
            f"epochs recorded anew, from stores that were verified byte for byte: "
            f"{format_ranges(sorted(plan.rebuilt))}"
        )
    lines += _join_paths("no longer recorded:", plan.given_up.items())
    if plan.lost:
        lines.append(
            f"lost entries of the log: {format_ranges(sorted(plan.lost))}. Pins in these entries "
            f"are lost too: pin those epochs again."
        )
    lines += _join_paths("not recorded:", sorted(plan.unproven.items()))
    return [*lines, "No store is changed. Damaged entries are kept as `_log/*.json.damaged`."]


def _join_paths(title: str, reasons: Iterable[tuple[object, str]]) -> list[str]:
    """Each reason once, with all that it holds for: the first few and the number of the others."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        names_by_reason.setdefault(reason, []).append(str(name))
    lines = []
    for reason, names in names_by_reason.items():
        lines.append(f"{title} {listed(names, _MOST_NAMES)}: {reason}")
    return lines
