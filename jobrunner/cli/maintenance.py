"""Commands on a whole directory: ``prune`` and ``fsck``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jobrunner.cli.command import Output, exit_code_of, main
from jobrunner.cli.disk import measure
from jobrunner.cli.options import directory_argument, open_manager, take_over_option
from jobrunner.cli.saving import keep_options, with_partial
from jobrunner.cli.tables import draw_rows
from jobrunner.errors import CheckpointCorruptError, DefinitionError
from jobrunner.positions import Position, PublicPosition, format_ranges
from jobrunner.texts import format_bytes, listed

if TYPE_CHECKING:
    from jobrunner.checkpoint import EpochRecord, KeepAny, MultiNodeCheckpointManager, Repair

_MOST_NAMES = 3
_DELETION_SECONDS = 3600.0  # that prune waits; the next run deletes the rest


@main.command(
    "prune",
    examples=[
        "jobrunner prune runs/kmeans --keep-last 3 --dry-run",
        "jobrunner prune runs/kmeans --keep-every 10 --keep-best loss",
    ],
)
@directory_argument
@keep_options
@click.option(
    "--keep-partial",
    is_flag=True,
    help="Checkpoints in the middle of an epoch count too. [default: delete them]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; change nothing.")
@take_over_option
def prune_command(
    *, directory: str, keep: KeepAny | None, keep_partial: bool, dry_run: bool, take_over: bool
) -> Output:
    """Delete the epochs of DIR that no option keeps.

    Always keeps the newest epoch and pinned epochs.
    """
    policy = _policy(keep, keep_partial)
    manager = open_manager(directory, keep=policy, take_over=take_over)
    check_records(manager, policy)
    pruned = _prune(manager, is_dry=dry_run)
    state = manager.directory.log.refresh()
    kept = sorted(set(state.recorded).difference(pruned.retired))
    data = {
        "path": manager.path,
        "dry_run": dry_run,
        "retired": pruned.retired,
        "left": pruned.left,
        "kept": kept,
        "pinned": list(manager.pins()),
        "nbytes": pruned.nbytes,
        "freed_nbytes": pruned.freed_nbytes,
    }
    condition = "would be " if dry_run else ""
    if not pruned.retired:
        return Output(data, [f"Nothing {condition}deleted. Number of epochs kept: {len(kept)}."])
    lines = []
    if pruned.deleted:
        freed = "sizes are logical"
        if pruned.freed_nbytes is not None:
            verb = "would free" if dry_run else "frees"
            freed = f"the disk {verb} {format_bytes(pruned.freed_nbytes)}"
        size = f"{format_bytes(pruned.nbytes)}; {freed}"
        lines.append(f"{condition}deleted: {_format(pruned.deleted)} ({size})")
    if pruned.left:
        lines.append(f"retired, not deleted yet (the next run tries again): {_format(pruned.left)}")
    return Output(data, [*lines, f"kept: {_format(kept)}"])


def _policy(keep: KeepAny | None, keep_partial: bool) -> KeepAny:
    if keep is None:
        if keep_partial:
            from jobrunner.checkpoint import KeepAll, KeepAny

            return KeepAny((KeepAll(partial=True),))
        raise DefinitionError(
            "Give at least one of --keep-last N, --keep-every N and --keep-best METRIC. An epoch "
            "stays if any of them keeps it."
        )
    return with_partial(keep) if keep_partial else keep


class Pruned(NamedTuple):
    """What `prune` has done, or would do."""

    sizes: Mapping[Position, int]
    """The retired epochs, each with its size in bytes."""
    left: Sequence[Position]
    """Those of them whose stores could not be deleted yet."""
    freed_nbytes: int | None
    """On the disk; None if that is not known."""

    @property
    def retired(self) -> list[Position]:
        """The epochs that no option keeps."""
        return list(self.sizes)

    @property
    def deleted(self) -> list[Position]:
        """Those whose stores are gone."""
        return [epoch for epoch in self.sizes if epoch not in self.left]

    @property
    def nbytes(self) -> int:
        """The size of what is deleted."""
        return sum(self.sizes[epoch] for epoch in self.deleted)


def _prune(manager: MultiNodeCheckpointManager, *, is_dry: bool) -> Pruned:
    if is_dry or manager.directory.log.refresh().number < 0:
        return _plan_prune(manager)
    manager.run.start([], {"command": "prune"})
    try:
        plan = _plan_prune(manager)
        manager.retention.retire()
        manager.retention.sweeper.drain(_DELETION_SECONDS)
    finally:
        manager.run.end()
    given_up = set(manager.directory.log.refresh().given_up)
    undeleted = {item.at for item in given_up - manager.retention.sweeper.deleted}
    left = sorted(undeleted.intersection(plan.retired))
    return plan._replace(left=left, freed_nbytes=None if left else plan.freed_nbytes)


def _plan_prune(manager: MultiNodeCheckpointManager) -> Pruned:
    records = read_records(manager, manager.retention.retirable())
    stores = [store.name for record in records for store in record.stores.values()]
    space = measure(manager.directory, stores)
    sizes = {record.at: record.nbytes for record in records}
    return Pruned(sizes, [], None if space is None else space.freed)


def read_records(
    manager: MultiNodeCheckpointManager, epochs: Sequence[Position]
) -> list[EpochRecord]:
    """The records of epochs; raises CheckpointCorruptError, for all that cannot be read."""
    records = []
    unreadable: dict[PublicPosition, CheckpointCorruptError] = {}
    for epoch, record in manager.records(epochs):
        if isinstance(record, CheckpointCorruptError):
            unreadable[epoch] = record
        else:
            records.append(record)
    if unreadable:
        first = next(iter(unreadable.values()))
        plural = "s" if len(unreadable) > 1 else ""
        raise CheckpointCorruptError(
            f"Nothing was deleted in {manager.path}: the record{plural} of epoch{plural} "
            f"{format_ranges(list(unreadable))} cannot be read: {first}",
            path=first.path,
        ) from first
    return records


def check_records(manager: MultiNodeCheckpointManager, policy: KeepAny) -> None:
    """Refuse to prune if a record that decides cannot be read, or a metric is unknown."""
    from jobrunner.checkpoint import SavedEpoch, best_policies, find_unreported, name_reported

    deciding = manager.retention.retirable()
    if best_policies(policy):
        deciding = manager.positions()
    saved = []
    for record in read_records(manager, deciding):
        saved.append(SavedEpoch(record.at, metrics=record.details.metrics))
    names = find_unreported(policy, saved)
    if saved and names:
        raise DefinitionError(
            f"No epoch of {manager.path} has reported {names[0]!r}, so --keep-best would keep only "
            f"the newest. Reported metrics: {name_reported(saved)}."
        )


def _format(positions: Iterable[Position]) -> str:
    return format_ranges([at.public for at in positions])


@main.command(
    "fsck",
    examples=[
        "jobrunner fsck runs/kmeans --brief",
        "jobrunner fsck runs/kmeans --repair",
    ],
)
@directory_argument
@click.option("--brief", "is_brief", is_flag=True, help="Show only stray and damaged objects.")
@click.option(
    "--repair",
    "is_repair",
    is_flag=True,
    help="If log entries are lost, record what the other files prove.",
)
def fsck_command(*, directory: str, is_brief: bool, is_repair: bool) -> Output:
    """Explain everything in DIR that is not part of a checkpoint.

    Without --repair, changes nothing and shows what a repair would do. No run may use DIR during a
    repair.
    """
    manager = open_manager(directory)
    return repair(manager) if is_repair else inspect(manager, is_brief=is_brief)


def inspect(manager: MultiNodeCheckpointManager, *, is_brief: bool) -> Output:
    """Explain the objects of a directory, and what a repair would do."""
    from jobrunner.checkpoint import inspect_directory, plan_repair

    findings = inspect_directory(manager.directory)
    counts = Counter(finding.status for finding in findings)
    plan = None
    refusal = ""
    try:
        plan = plan_repair(manager.directory)
    except CheckpointCorruptError as obstacle:
        refusal = f"--repair cannot help: {obstacle}"
    data = {
        "path": manager.path,
        "counts": dict(counts),
        "objects": [asdict(finding) for finding in findings],
        "repair": None if plan is None else _describe_repair(plan),
    }
    rows = []
    for status in ("damaged", "stray") if is_brief else ("damaged", "stray", "pending", "aside"):
        reasons = [(f.path, f.explanation) for f in findings if f.status == status]
        rows += [(status, *row) for row in _join_paths(reasons)]
    lines = draw_rows(rows)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines.append(f"{manager.path}: {summary or 'the directory is empty'}.")
    if plan is not None:
        lines += ["", f"`jobrunner fsck {manager.path} --repair` would do this:"]
        lines += _tell_repair(plan)
    if refusal:
        lines.append(refusal)
    damages = [f.explanation for f in findings if f.status == "damaged"]
    error = CheckpointCorruptError(damages[0]) if damages else None
    return Output(data, lines, exit_code_of(error))


def repair(manager: MultiNodeCheckpointManager) -> Output:
    """Repair the log of a directory."""
    from jobrunner.checkpoint import repair_log

    done = repair_log(manager.directory)
    if done is None:
        data = {"path": manager.path, "repair": None}
        return Output(data, [f"{manager.path}: nothing to repair."])
    lines = [f"The log of {manager.path} can be read again.", *_tell_repair(done)]
    return Output({"path": manager.path, "repair": _describe_repair(done)}, lines)


def _describe_repair(plan: Repair) -> dict[str, Any]:
    return {
        "lost": plan.lost,
        "kept": plan.kept,
        "rebuilt": sorted(plan.rebuilt),
        "given_up": plan.given_up,
        "unproven": plan.unproven,
    }


def _tell_repair(plan: Repair) -> list[str]:
    lines = [f"epochs that stay recorded: {_format(plan.kept)}"]
    if plan.rebuilt:
        lines.append(
            f"epochs recorded anew, from stores that were verified byte for byte: "
            f"{_format(plan.rebuilt)}"
        )
    given_up = [(str(epoch), reason) for epoch, reason in plan.given_up.items()]
    lines += [f"no longer recorded: {names}: {reason}" for names, reason in _join_paths(given_up)]
    if plan.lost:
        lines.append(
            f"lost entries of the log: {format_ranges(sorted(plan.lost))}. Pins in these entries "
            f"are lost too: pin those epochs again."
        )
    unproven = sorted(plan.unproven.items())
    lines += [f"not recorded: {names}: {reason}" for names, reason in _join_paths(unproven)]
    return [*lines, "No store is changed. Damaged entries are kept as `_log/*.json.damaged`."]


def _join_paths(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each reason once, with all that it holds for: the first few and the number of the others."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        names_by_reason.setdefault(reason, []).append(name)
    return [(listed(names, _MOST_NAMES), reason) for reason, names in names_by_reason.items()]
