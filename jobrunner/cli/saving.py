"""Options that say what a run saves, and which epochs are kept."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click

from jobrunner.cli.options import count_option, take_over_option
from jobrunner.errors import DefinitionError

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        KeepAny,
        KeepBest,
        MultiNodeCheckpointManager,
        RetentionPolicy,
        SavePolicy,
    )
    from jobrunner.cli.command import Output
    from jobrunner.cli.script import Script

    Function = Callable[..., Output]

_BEST = re.compile(r"(?P<metric>(.+/)?[^:]+)(:(?P<mode>min|max))?(:(?P<count>\d{1,18}|all))?")
_BEST_FORM = "METRIC[:min|max][:N|all]"
_AUTO = re.compile(r"auto(:(?P<percent>\d{1,3}(\.\d{1,9})?)%)?")
_INTERVAL = re.compile(r"(?P<count>\d{1,18})(?P<unit>steps|s|)")


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
        metavar=_BEST_FORM,
        help="Keep the N epochs with the lowest value of a metric, or the highest. "
        "[default: min, 1]",
    )
    @functools.wraps(function)
    def call(
        *, keep_last: int | None, keep_every: str | None, keep_best: tuple[str, ...], **others: Any
    ) -> Output:
        keep = functools.partial(_read_keep, keep_last, keep_every, keep_best)
        return function(keep=keep, **others)

    return call


def _read_keep(
    last: int | None, every: str | None, best: Sequence[str], *, partial: bool = False
) -> KeepAny | None:
    """The policy that keeps an epoch if one of the options does; None without options."""
    from jobrunner.checkpoint import KeepAll, KeepAny, KeepEvery, KeepLast

    policies: list[RetentionPolicy] = []
    if last is not None:
        policies.append(KeepLast(last, partial))
    if every is not None:
        unit, count = _read_interval("--keep-every", every, "epochs or seconds, for example 10")
        interval = {"n" if unit == "epochs" else unit: count}
        policies.append(KeepEvery(**interval, partial=partial))
    policies += [_read_best(text, partial) for text in best]
    if partial and not policies:
        policies.append(KeepAll(partial=True))
    return KeepAny(tuple(policies)) if policies else None


def _read_best(text: str, partial: bool) -> KeepBest:
    from jobrunner.checkpoint import KeepBest

    match = _BEST.fullmatch(text)
    if match is None:
        raise DefinitionError(
            f"--keep-best {text}: expected {_BEST_FORM}, for example loss:min:3 or accuracy:max."
        )
    count = None if match["count"] == "all" else int(match["count"] or 1)
    mode: Literal["min", "max"] = "max" if match["mode"] == "max" else "min"
    return KeepBest(match["metric"], count, mode, partial)


def manager_options(function: Function) -> Function:
    """Add the options of a run's manager; pass `make_manager`.

    It makes the manager, given the script and the checkpoint directory.
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
        "--sync",
        "is_synchronous",
        is_flag=True,
        help="Wait until each save is recorded before the next epoch begins.",
    )
    @click.option(
        "--allow-pickle",
        is_flag=True,
        help="Pickle blobs that cannot be saved otherwise, and unpickle them. Only if you trust "
        "everyone who can write to DIR.",
    )
    @click.option(
        "--manager",
        "manager_name",
        metavar="NAME",
        help="A function of FILE_OR_MODULE that makes the manager of DIR, which it gets, with all "
        "that can be set in Python; instead of the options above that say what to save and keep.",
    )
    @take_over_option
    @functools.wraps(function)
    def call(
        *,
        save_every: tuple[str, ...],
        save_before: str | None,
        keep: Callable[..., KeepAny | None],
        is_synchronous: bool,
        allow_pickle: bool,
        manager_name: str | None,
        take_over: bool,
        **others: Any,
    ) -> Output:
        options: dict[str, Any] = {
            "save": _read_save(save_every, save_before),
            "keep": keep(),
            "allow_pickle": allow_pickle,
        }
        if is_synchronous:
            options["asynchronous"] = False
        is_given = is_synchronous or any(options.values())
        if manager_name is not None and is_given:
            raise click.UsageError(
                f"--manager {manager_name}: the function says itself what is saved and kept. Leave "
                f"out --save-every, --save-before, --keep-..., --sync and --allow-pickle."
            )

        def make_manager(script: Script, path: str) -> MultiNodeCheckpointManager:
            from jobrunner.checkpoint import MultiNodeCheckpointManager

            if manager_name is None:
                return MultiNodeCheckpointManager(path, **options, take_over=take_over)
            manager = script.manager(manager_name, path)
            if take_over:
                manager.run = replace(manager.run, take_over=True)
            return manager

        return function(make_manager=make_manager, **others)

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
