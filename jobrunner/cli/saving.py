"""Options that say what a run saves, and which epochs are kept."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click

from jobrunner.cli.options import (
    complete_directories,
    count_option,
    read_pairs,
    refuse_epoch,
    take_over_option,
)
from jobrunner.errors import DefinitionError

if TYPE_CHECKING:
    from jobrunner.checkpoint import KeepAny, KeepBest, RetentionPolicy, SavePolicy
    from jobrunner.cli.command import Output

    Function = Callable[..., Output]

_BEST = re.compile(
    r"(?P<metric>(.+/)?[^:]+)(:(?P<mode>min|max))?(:(?P<count>\d{1,18}|all))?"
    r"(:threshold=(?P<threshold>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?))?"
)
_BEST_FORM = "[:min|max][:N|all][:threshold=X]"
_AUTO = re.compile(r"auto(:(?P<percent>\d{1,3}(\.\d{1,9})?)%)?")
_INTERVAL = re.compile(r"(?P<count>\d{1,18})(?P<unit>steps|s|)")

_AS_GIVEN = (
    *("asynchronous", "load_path", "delete_on_success", "save_on_failure", "allow_pickle"),
    "take_over",
)
"""Options with the names and values of the manager's arguments."""


def keep_options(function: Function) -> Function:
    """Add ``--keep-last`` and the like; pass `keep`, which makes the policy: see `_read_keep`."""

    @count_option("--keep-last", help="Keep the newest N epochs.")
    @click.option(
        "--keep-every",
        metavar="N|Ns",
        help="Keep epochs that are multiples of N, or one every N seconds (600s).",
    )
    @click.option(
        "--keep-best",
        multiple=True,
        metavar=f"METRIC{_BEST_FORM}",
        help="Keep the N epochs with the lowest value of a metric, or the highest; with a "
        "threshold, only those that reach it. [default: min, 1]",
    )
    @click.option(
        "--keep-partial",
        is_flag=True,
        help="Checkpoints in the middle of an epoch count too; without other --keep options, keep "
        "all. [default: remove them when a newer checkpoint is recorded]",
    )
    @functools.wraps(function)
    def call(
        *,
        keep_last: int | None,
        keep_every: str | None,
        keep_best: tuple[str, ...],
        keep_partial: bool,
        **others: Any,
    ) -> Output:
        keep = functools.partial(_read_keep, keep_last, keep_every, keep_best, keep_partial)
        return function(keep=keep, **others)

    return call


def _read_keep(
    last: int | None,
    every: str | None,
    best: Sequence[str],
    partial: bool,
    best_by: Sequence[str] = (),
    find: Callable[[str, str], Any] | None = None,
) -> KeepAny | None:
    """The policy that keeps an epoch if one of the options does; None without options.

    `find` returns the function of the job's file that `best_by` names.
    """
    from jobrunner.checkpoint import KeepAll, KeepAny, KeepEvery, KeepLast

    policies: list[RetentionPolicy] = []
    if last is not None:
        policies.append(KeepLast(last, partial))
    if every is not None:
        unit, count = _read_interval("--keep-every", every, "epochs or seconds, for example 10")
        interval = {"n" if unit == "epochs" else unit: count}
        policies.append(KeepEvery(**interval, partial=partial))
    policies += [_read_best("--keep-best", "METRIC", text, partial) for text in best]
    policies += [_read_best("--keep-best-by", "NAME", text, partial, find) for text in best_by]
    if partial and not policies:
        policies.append(KeepAll(partial=True))
    return KeepAny(tuple(policies)) if policies else None


def _read_best(
    option: str, what: str, text: str, partial: bool, find: Callable[[str, str], Any] | None = None
) -> KeepBest:
    from jobrunner.checkpoint import KeepBest

    match = _BEST.fullmatch(text)
    if match is None:
        raise DefinitionError(
            f"{option} {text}: expected {what}{_BEST_FORM}, for example loss:min:3 or "
            f"accuracy:max:all:threshold=0.9."
        )
    metric = match["metric"] if find is None else find(match["metric"], option)
    most = None if match["count"] == "all" else int(match["count"] or 1)
    mode: Literal["min", "max"] = "max" if match["mode"] == "max" else "min"
    threshold = None if match["threshold"] is None else float(match["threshold"])
    return KeepBest(metric, most, mode, partial, threshold)


def save_options(function: Function) -> Function:
    """Add the options of a run's manager; pass `saving`: its keywords.

    ``saving["keep"]`` makes the policy, given what finds a function in the job's file.
    """

    @click.option(
        "--save-every",
        multiple=True,
        metavar="N|Nsteps|Ns|auto[:P%]",
        help="Save every N epochs, N steps or N seconds; 'auto': as saves and losses cost least "
        "time, at most P % of it. May be repeated. [default: 1; auto:2%]",
    )
    @click.option(
        "--save-before",
        metavar="TIME|slurm",
        help="Save once more before TIME (2030-12-31T18:00), or before the end of the Slurm job.",
    )
    @keep_options
    @click.option(
        "--keep-best-by",
        multiple=True,
        metavar=f"NAME{_BEST_FORM}",
        help="As --keep-best, by what a function of FILE_OR_MODULE makes of an epoch's metrics.",
    )
    @click.option(
        "--async",
        "asynchronous",
        is_flag=True,
        help="Save in the background, while later epochs run.",
    )
    @click.option(
        "--budget",
        metavar="SIZE",
        help="With --async: how much memory its copies may take in each worker, as in 2GiB.",
    )
    @click.option(
        "--compress",
        multiple=True,
        metavar="NAME",
        help="Compress arrays: zstd, blosc, gzip. [default: no]",
    )
    @click.option(
        "--load-from",
        "load_path",
        callback=refuse_epoch,
        shell_complete=complete_directories,
        metavar="DIR",
        help="Another checkpoint directory to resume from while this one records no epoch.",
    )
    @click.option(
        "--delete-on-success", is_flag=True, help="Delete all epochs when the job has ended."
    )
    @click.option(
        "--save-on-failure",
        is_flag=True,
        help="If a task fails, save the last state in which an epoch or step had ended.",
    )
    @click.option(
        "--metadata",
        callback=read_pairs,
        multiple=True,
        metavar="NAME=TEXT",
        help="Add a text to the record of each epoch, where `info` shows it. May be given several "
        "times.",
    )
    @click.option(
        "--allow-pickle",
        is_flag=True,
        help="Pickle blobs that cannot be saved otherwise, and unpickle them. Only if you trust "
        "everyone who can write to DIR.",
    )
    @take_over_option
    @functools.wraps(function)
    def call(
        *,
        save_every: tuple[str, ...],
        save_before: str | None,
        keep: Callable[..., KeepAny | None],
        keep_best_by: tuple[str, ...],
        budget: str | None,
        compress: tuple[str, ...],
        metadata: dict[str, str],
        **others: Any,
    ) -> Output:
        saving = {name: others.pop(name) for name in _AS_GIVEN}
        if budget is not None and not saving["asynchronous"]:
            raise click.UsageError("--budget limits the copies of --async: give both.")
        saving["keep"] = functools.partial(keep, keep_best_by)
        saving["save"] = _read_save(save_every, save_before)
        saving["budget_bytes"] = None if budget is None else _read_size(budget)
        saving["compressors"] = compress or None
        saving["metadata"] = metadata or None
        return function(saving=saving, **others)

    return call


def _read_save(texts: Sequence[str], before: str | None) -> SavePolicy | None:
    from jobrunner.checkpoint import SaveBefore, SaveEvery

    policies: list[Any] = []
    for text in texts:
        match = _AUTO.fullmatch(text)
        if match and 0 < (percent := float(match["percent"] or 2)) < 100:
            policies.append(SaveEvery("auto", max_overhead=percent / 100))
            continue
        unit, count = _read_interval(
            "--save-every", text, "epochs, steps or seconds, for example 5, 100steps, auto:5%"
        )
        policies.append(SaveEvery(**{unit: count}))
    if before is not None:
        if not texts:
            policies.append(SaveEvery(epochs=1))
        policies.append(SaveBefore("slurm" if before == "slurm" else _read_time(before)))
    return functools.reduce(operator.or_, policies) if policies else None


def _read_interval(option: str, text: str, units: str) -> tuple[str, int]:
    """Read ``N``, ``Nsteps`` or ``Ns``: the unit and the number."""
    match = _INTERVAL.fullmatch(text)
    if (
        match is None
        or not int(match["count"])
        or (match["unit"] == "steps" and "steps" not in units)
    ):
        raise click.UsageError(f"{option} {text}: expected a number of {units} or 600s.")
    return {"": "epochs", "steps": "steps", "s": "seconds"}[match["unit"]], int(match["count"])


def _read_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(
            f"--save-before {text}: expected a time, for example 2030-12-31T18:00, or 'slurm'."
        ) from None


def _read_size(text: str) -> int:
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except ValueError:
        raise click.UsageError(f"--budget {text}: expected a size, for example 2GiB.") from None
