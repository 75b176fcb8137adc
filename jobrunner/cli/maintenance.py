"""Commands on a whole directory: ``prune`` and ``fsck``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import Output, exit_code_of, main
from jobrunner.cli.formatting import format_table
from jobrunner.cli.options import directory_argument, open_manager, take_over_option
from jobrunner.cli.saving import keep_options
from jobrunner.errors import CheckpointCorruptError, DefinitionError
from jobrunner.positions import Position, PublicPosition, format_ranges
from jobrunner.texts import format_bytes, listed, printable

if TYPE_CHECKING:
    from jobrunner.checkpoint import KeepAny, MultiNodeCheckpointManager, Repair

_MAX_SHOWN = 3
_DELETION_SECONDS = 3600.0  # that prune waits; the next run deletes the rest
_MASKED = 1000  # characters of a reason that are compared
_DETAIL = re.compile(r"'[^']*'|/\S+|[0-9a-f]{8,}|\d+")


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
    *,
    directory: str,
    keep: Callable[..., KeepAny | None],
    keep_partial: bool,
    dry_run: bool,
    take_over: bool,
) -> Output:
    """Delete the epochs of DIR that no option keeps.

    Always keeps the newest epoch and pinned epochs.
    """
    policy = keep(partial=keep_partial)
    if policy is None:
        raise DefinitionError(
            "Give at least one of --keep-last N, --keep-every N and --keep-best METRIC. An epoch "
            "stays if any of them keeps it."
        )
    manager = open_manager(directory, keep=policy, take_over=take_over)
    _check_records(manager, policy)
    if dry_run or manager.directory.log.refresh().number < 0:
        retired = manager.retention.retirable()
        sizes = _sizes(manager, retired)
    else:
        manager.run.start([], {"command": "prune"})
        try:
            sizes = _sizes(manager, manager.retention.retirable())
            retired = manager.retention.retire()
            manager.retention.sweeper.drain(_DELETION_SECONDS)
        finally:
            manager.run.end()
    state = manager.directory.log.refresh()
    kept = sorted(set(state.recorded).difference(retired))
    left = []
    if not dry_run:
        doomed = set(state.given_up) - manager.retention.sweeper.deleted
        left = sorted({item.at for item in doomed}.intersection(retired))
    deleted = [epoch for epoch in retired if epoch not in left]
    nbytes = sum(sizes[epoch.public] for epoch in deleted)
    data = {
        "path": manager.path,
        "dry_run": dry_run,
        "retired": retired,
        "left": left,
        "kept": kept,
        "pinned": list(manager.pins()),
        "nbytes": nbytes,
    }
    would = "would be " if dry_run else ""
    if not retired:
        return Output(data, f"Nothing {would}deleted. Number of epochs kept: {len(kept)}.")
    lines = [f"{would}deleted: {format_ranges(_public(deleted))} ({format_bytes(nbytes)})"] * bool(
        deleted
    )
    if left:
        lines.append(
            f"retired, not deleted yet (the next run tries again): {format_ranges(_public(left))}"
        )
    return Output(data, "\n".join([*lines, f"kept: {format_ranges(_public(kept))}"]))


def _check_records(manager: MultiNodeCheckpointManager, policy: KeepAny) -> None:
    """Refuse to prune if a record that decides cannot be read, or a metric is unknown."""
    from jobrunner.checkpoint import SavedEpoch, best_policies, find_unreported, name_reported

    saved = []
    unreadable: dict[PublicPosition, CheckpointCorruptError] = {}
    for epoch, record in manager.records(
        manager.positions() if best_policies(policy) else manager.retention.retirable()
    ):
        if isinstance(record, CheckpointCorruptError):
            unreadable[epoch] = record
        else:
            metrics = record.details.metrics
            saved.append(SavedEpoch(Position.of(epoch), metrics=metrics))
    if unreadable:
        first, *others = unreadable.values()
        epochs = f"epoch{'s' if others else ''} {format_ranges(list(unreadable))}"
        raise CheckpointCorruptError(
            f"Nothing was deleted in {manager.path}: the record{'s' if others else ''} of {epochs} "
            f"cannot be read: {first}",
            path=first.path,
        ) from first
    names = find_unreported(policy, saved)
    if saved and names:
        raise DefinitionError(
            f"No epoch of {manager.path} has reported {names[0]!r}, so --keep-best would keep only "
            f"the newest. Reported metrics: {name_reported(saved)}."
        )


def _public(positions: Iterable[Position]) -> list[PublicPosition]:
    return [at.public for at in positions]


def _sizes(
    manager: MultiNodeCheckpointManager, epochs: Sequence[Position]
) -> dict[PublicPosition, int]:
    sizes = {}
    for epoch, record in manager.records(epochs):
        if isinstance(record, CheckpointCorruptError):
            raise record
        sizes[epoch] = record.nbytes
    return sizes


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
    return _repair(manager) if is_repair else _inspect(manager, is_brief=is_brief)


def _inspect(manager: MultiNodeCheckpointManager, *, is_brief: bool) -> Output:
    from jobrunner.checkpoint import inspect_directory, plan_repair

    found = inspect_directory(manager.directory)
    counts = Counter(finding.status for finding in found)
    plan, refusal = None, ""
    try:
        plan = plan_repair(manager.directory)
    except CheckpointCorruptError as why:
        refusal = f"--repair cannot help: {why}"
    data = {
        "path": manager.path,
        "counts": dict(counts),
        "objects": [asdict(finding) for finding in found],
        "repair": None if plan is None else _describe_repair(plan),
    }
    shown = ("damaged", "stray") if is_brief else ("damaged", "stray", "pending", "aside")
    rows = [
        (status, paths, f"({count} alike) {why}" if count > 1 else why)
        for status in shown
        for paths, count, why in _join_alike(
            (f.path, f.explanation) for f in found if f.status == status
        )
    ]
    lines = [format_table(rows)] if rows else []
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines.append(f"{manager.path}: {summary or 'the directory is empty'}.")
    if plan is not None:
        lines += ["", f"`jobrunner fsck {manager.path} --repair` would do this:"]
        lines += _format_repair(plan)
    lines += [refusal] if refusal else []
    damage = next((f for f in found if f.status == "damaged"), None)
    error = None if damage is None else CheckpointCorruptError(damage.explanation)
    return Output(data, "\n".join(lines), exit_code_of(error))


def _repair(manager: MultiNodeCheckpointManager) -> Output:
    from jobrunner.checkpoint import repair_log

    done = repair_log(manager.directory)
    if done is None:
        return Output({"path": manager.path, "repair": None}, f"{manager.path}: nothing to repair.")
    lines = [f"The log of {manager.path} can be read again.", *_format_repair(done)]
    return Output({"path": manager.path, "repair": _describe_repair(done)}, "\n".join(lines))


def _describe_repair(plan: Repair) -> dict[str, Any]:
    return {
        "lost": plan.lost,
        "kept": plan.kept,
        "rebuilt": sorted(plan.rebuilt),
        "given_up": plan.given_up,
        "unproven": plan.unproven,
    }


def _format_repair(plan: Repair) -> list[str]:
    lost = sorted(plan.lost)
    lines = [f"epochs that stay recorded: {format_ranges(_public(plan.kept))}"]
    if plan.rebuilt:
        lines.append(
            f"epochs recorded anew, from stores that were verified byte for byte: "
            f"{format_ranges(_public(plan.rebuilt))}"
        )
    given_up = ((str(epoch), why) for epoch, why in plan.given_up.items())
    lines += [f"no longer recorded: {names}: {why}" for names, _, why in _join_alike(given_up)]
    if lost:
        lines.append(
            f"lost entries of the log: {format_ranges(lost)}. Pins in these entries are lost too: "
            f"pin those epochs again."
        )
    unproven = sorted(plan.unproven.items())
    lines += [f"not recorded: {names}: {why}" for names, _, why in _join_alike(unproven)]
    lines = [printable(line, kept="") for line in lines]
    return [*lines, "No store is changed. Damaged entries are kept as `_log/*.json.damaged`."]


def _join_alike(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, int, str]]:
    """Say once what is the reason of several names; if more than a few differ in details, the first.

    Gives names, their number and the reason.
    """
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons:
        by_reason.setdefault(why, []).append(name)
    alike: dict[str, list[str]] = {}
    for why in by_reason:
        alike.setdefault(_DETAIL.sub("#", why[:_MASKED]), []).append(why)
    joined = []
    for whys in alike.values():
        groups = [whys] if len(whys) > _MAX_SHOWN else [[why] for why in whys]
        for group in groups:
            names = [name for why in group for name in by_reason[why]]
            joined.append((listed(names, _MAX_SHOWN), len(names), group[0]))
    return joined
