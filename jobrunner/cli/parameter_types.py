"""What arguments and options take: names of directories, files, jobs and epochs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from jobrunner import errors
from jobrunner.outputs import check_output
from jobrunner.positions import BEST, Position, parse_position
from jobrunner.texts import without_credentials

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_MOST_DIGITS = 18  # Python refuses to read numbers of thousands of digits
NamedEpoch = Position | str
"""An epoch as a command names it: a position, "latest" or "best:METRIC"."""


class Parsed(click.ParamType[Any]):
    """What `parse` makes of a text; what it refuses is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any], completion: str = "") -> None:
        self.name = name
        self.parse = parse
        self.completion = completion  # "file" or "dir": what the shell completes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a text."""
        try:
            return self.parse(value)
        except (ValueError, OSError) as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete the name of a file or a directory."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.completion)] if self.completion else []


def _parse_output(path: str) -> str:
    check_output(path)  # now, not in the end
    return path


TARGET = Parsed("FILE_OR_MODULE[:JOB]", str, "file")
INPUT = Parsed("FILE", str, "file")
OUTPUT = Parsed("FILE", _parse_output, "file")
ANY_DIRECTORY = Parsed("DIR", str, "dir")


class _DirectoryName(Parsed):
    """A checkpoint directory; refuses ``DIR@EPOCH``, unless a directory has that name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        directory, epoch = split_checkpoint(value)
        if epoch is None:
            return value
        from jobrunner.checkpoint import Directory

        with contextlib.suppress(OSError, errors.JobRunnerError):  # the command reports it
            place = Directory(value)
            if not place.files.is_taken(place.path):
                self.fail(
                    f"There is no directory {value!r}. Only `jobrunner diff` takes DIR@EPOCH. Other "
                    f"commands that take an epoch get it by itself: {directory or 'DIR'} {epoch}",
                    param,
                    ctx,
                )
        return value


DIRECTORY = _DirectoryName("DIR", str, "dir")


class EpochName(Parsed):
    """A number, a position such as ``4.s200``, "latest" or "best:METRIC"; or one of `words`."""

    def __init__(self, *words: str) -> None:
        super().__init__("EPOCH", str)
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a text; one of `words` stays as it is."""
        if value in self.words:
            return value
        epoch = parse_epoch(value)
        if epoch is None:
            words = "".join(f" nor {word!r}" for word in self.words)
            self.fail(
                f"{value!r} is neither 'latest'{words} nor 'best:METRIC' nor the number of an epoch, "
                f"nor a position such as 4.s200.",
                param,
                ctx,
            )
        return epoch

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The epochs whose stores are in the directory; reads nothing else, so that it is quick."""
        from click.shell_completion import CompletionItem

        from jobrunner.names import parse_store_name

        directory = ctx.params.get("directory") or ctx.params.get("checkpoint")
        epochs = set()
        with contextlib.suppress(OSError):  # none, or a URL
            # Before an option without its value, click leaves the arguments in `args`.
            for name in os.listdir(directory or "".join(ctx.args[:1])):
                store = parse_store_name(name)
                if store is not None:
                    epochs.add(store.epoch)
        if not epochs:
            return []
        texts = ["latest", *self.words, *map(str, sorted(epochs))]
        return [CompletionItem(text) for text in texts if text.startswith(incomplete)]


def parse_epoch(text: str) -> NamedEpoch | None:
    """Read the name of an epoch; None for another text."""
    if text == "latest" or BEST.fullmatch(text):
        return text
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return Position(int(text))
    return parse_position(text)


def split_checkpoint(text: str) -> tuple[str, str | None]:
    """Split ``DIR@EPOCH``; DIR may contain "@". None: it names no epoch."""
    directory, at, epoch = text.rpartition("@")
    if at and parse_epoch(epoch) is not None:
        return directory, epoch
    return text, None


def has_credentials(param: click.Parameter, value: object) -> bool:
    """Whether what was given names a file, directory or epoch by a URL with credentials or a query."""
    if not isinstance(value, str):
        return False
    if not (isinstance(param, click.Argument) or isinstance(param.type, Parsed)):
        return False
    url, _ = split_checkpoint(value)
    return without_credentials(url) != url
