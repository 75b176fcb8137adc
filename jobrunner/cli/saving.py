"""Options that say what a run saves, and which epochs are kept."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click

from jobrunner.cli.options import allow_pickle_option, count_option, grouped, take_over_option
from jobrunner.cli.parameter_types import Parsed

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        KeepAny,
        KeepBest,
        MultiNodeCheckpointManager,
        SaveBefore,
        SaveEvery,
        SavePolicy,
    )
    from jobrunner.cli.script import Script

_BEST = re.compile(r"(?P<metric>(.+/)?[^:]+)(:(?P<mode>min|max))?(:(?P<count>\d{1,18}))?")
_BEST_FORM = "METRIC[:min|max][:N]"
_INTERVAL = re.compile(r"(?P<count>\d{1,18})(?P<unit>steps|s|)")
_UNITS: Mapping[str, Literal["epochs", "steps", "seconds"]] = {
    "": "epochs",
    "steps": "steps",
    "s": "seconds",
}


def _parse_save_every(text: str) -> SaveEvery:
    from jobrunner.checkpoint import SaveEvery

    interval = _INTERVAL.fullmatch(text)
    if interval is None or not int(interval["count"]):
        raise ValueError(
            f"{text}: expected a number of epochs, steps or seconds, for example 5, 100steps or "
            f"600s."
        )
    return SaveEvery(**{_UNITS[interval["unit"]]: int(interval["count"])})


def _parse_save_before(text: str) -> SaveBefore:
    from jobrunner.checkpoint import SaveBefore

    if text == "slurm":
        return SaveBefore("slurm")
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text}: expected a time, for example 2030-12-31T18:00, or 'slurm'."
        ) from None
    return SaveBefore(time)


def _parse_keep_best(text: str) -> KeepBest:
    from jobrunner.checkpoint import KeepBest

    match = _BEST.fullmatch(text)
    if match is None:
        raise ValueError(f"{text}: expected {_BEST_FORM}, for example loss:min:3 or accuracy:max.")
    mode: Literal["min", "max"] = "max" if match["mode"] == "max" else "min"
    return KeepBest(match["metric"], int(match["count"] or 1), mode)


def read_keep(
    keep_last: int | None, keep_every: int | None, keep_best: Sequence[KeepBest]
) -> KeepAny | None:
    """The policy that keeps an epoch if one of the options does; None without options."""
    if keep_last is None and keep_every is None and not keep_best:
        return None
    from jobrunner.checkpoint import KeepAny, KeepEvery, KeepLast

    last = [] if keep_last is None else [KeepLast(keep_last)]
    every = [] if keep_every is None else [KeepEvery(keep_every)]
    return KeepAny((*last, *every, *keep_best))


def with_partial(policy: KeepAny) -> KeepAny:
    """The policy, for checkpoints in the middle of an epoch too."""
    from jobrunner.checkpoint import KeepEvery

    policies: list[Any] = [*policy.policies]
    for i, part in enumerate(policies):
        if not isinstance(part, KeepEvery):
            policies[i] = replace(part, partial=True)
    return replace(policy, policies=tuple(policies))


keep_options = grouped(
    "keep",
    read_keep,
    count_option("--keep-last", help="Keep the newest N epochs."),
    count_option("--keep-every", help="Keep epochs that are multiples of N."),
    click.option(
        "--keep-best",
        multiple=True,
        type=Parsed(_BEST_FORM, _parse_keep_best),
        metavar=_BEST_FORM,
        help="Keep the N epochs with the lowest value of a metric, or the highest. "
        "[default: min, 1]",
    ),
)


@dataclass(frozen=True)
class ManagerOptions:
    """How a run's manager is made."""

    save_every: Sequence[SaveEvery]
    save_before: SaveBefore | None
    keep: KeepAny | None
    is_synchronous: bool
    allow_pickle: bool
    manager_name: str | None
    take_over: bool

    def make(self, script: Script, path: str) -> MultiNodeCheckpointManager:
        """Make the manager of a checkpoint directory."""
        from jobrunner.checkpoint import MultiNodeCheckpointManager

        options: dict[str, Any] = {}
        if self.save_every or self.save_before:
            options["save"] = self._save_policy()
        if self.keep is not None:
            options["keep"] = self.keep
        if self.is_synchronous:
            options["asynchronous"] = False
        if self.allow_pickle:
            options["allow_pickle"] = True
        if self.manager_name is None:
            return MultiNodeCheckpointManager(path, **options, take_over=self.take_over)
        if options:
            raise click.UsageError(
                f"--manager {self.manager_name}: the function says itself what is saved and kept. "
                f"Leave out --save-every, --save-before, --keep-..., --sync and --allow-pickle."
            )
        manager = script.manager(self.manager_name, path)
        if self.take_over:
            manager.run = replace(manager.run, take_over=True)
        return manager

    def _save_policy(self) -> SavePolicy:
        from jobrunner.checkpoint import SaveEvery

        policies: list[Any] = [*self.save_every]
        if self.save_before is not None:
            policies = [*(policies or [SaveEvery(epochs=1)]), self.save_before]
        policy: SavePolicy = functools.reduce(operator.or_, policies)
        return policy


manager_options = grouped(
    "manager_options",
    ManagerOptions,
    click.option(
        "--save-every",
        multiple=True,
        type=Parsed("N|Nsteps|Ns", _parse_save_every),
        metavar="N|Nsteps|Ns",
        help="Save every N epochs, N steps or N seconds. May be repeated. [default: 1]",
    ),
    click.option(
        "--save-before",
        type=Parsed("TIME|slurm", _parse_save_before),
        metavar="TIME|slurm",
        help="Save once more before TIME (2030-12-31T18:00), or before the end of the Slurm job.",
    ),
    keep_options,
    click.option(
        "--sync",
        "is_synchronous",
        is_flag=True,
        help="Wait until each save is recorded before the next epoch begins.",
    ),
    allow_pickle_option(
        "Pickle blobs that cannot be saved otherwise, and unpickle them. Only if you trust "
        "everyone who can write to DIR."
    ),
    click.option(
        "--manager",
        "manager_name",
        metavar="NAME",
        help="A function of FILE_OR_MODULE that makes the manager of DIR, which it gets, with all "
        "that can be set in Python; instead of the options above that say what to save and keep.",
    ),
    take_over_option,
)
