"""Files with a line for each epoch, right after crashes and resumes."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from jobrunner.callbacks.metrics import plain_metrics
from jobrunner.define import PATH, checked
from jobrunner.outputs import open_output, write_output
from jobrunner.run import Callback
from jobrunner.texts import printable


class _Lines:
    """A text file with a line for each epoch; a crash may tear the last one."""

    def __init__(
        self, path: str | os.PathLike[str], start: str, epoch_of: Callable[[str], int | None]
    ) -> None:
        self.path = os.fspath(path)
        self._start = start  # of the first line
        self._epoch_of = epoch_of  # None: a header; raises ValueError for a line of another file
        self._is_own = False  # nobody else wrote the file

    def read(self) -> list[str]:
        """The whole lines, without their ends; raises ValueError for a file of somebody else."""
        try:
            with open_output(
                self.path, "r", encoding="utf-8", errors="replace", newline=""
            ) as file:
                text: str = file.read()
        except FileNotFoundError:
            text = ""
        *lines, torn = text.split("\n")
        line = (lines or [torn])[0]
        try:
            if not line.startswith(self._start[: len(line)] if line is torn else self._start):
                raise ValueError
            for line in lines:
                self._epoch_of(line)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path} contains the line {line!r:.100}, which this log does not write. Give "
                f"the log another path, or remove the file."
            ) from error
        self._is_own = True
        return lines

    def cut(self, last: int) -> None:
        """Remove a torn line, and the lines of epochs after `last`."""
        epochs = [(self._epoch_of(line), line) for line in self.read()]
        kept = [line for epoch, line in epochs if epoch is None or epoch <= last]
        self.replace(kept if last else [])

    def replace(self, lines: list[str]) -> None:
        """Replace the file by one with these lines, at once."""
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        write_output(self.path, b"".join(map(_encode, lines)))

    def append(self, line: str) -> None:
        """Add a line, which others can read at once."""
        if not self._is_own:
            self.read()
        data = _encode(line)
        with open_output(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if file.write(data) < len(data):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def sync(self) -> None:
        """Return once the lines are on disk."""
        if self._is_own:
            with open_output(self.path, "rb") as file:
                os.fsync(file.fileno())


@checked(path=PATH)
class CSVLog(Callback):
    """Write a row for each epoch to a CSV file: its number, its seconds, its metrics.

    Parameters
    ----------
    path : str or os.PathLike
        Its directory is made if there is none. A file that another program wrote is not touched:
        the log raises `ValueError`, which is a warning.

    Notes
    -----
    The file has one row for each epoch that counts: a run that resumes, or recovers from a loss,
    first removes the rows of epochs after the one it loads, and a row that a crash has torn. A run
    that begins with the init group removes all. Rows are on disk before their epoch is recorded.
    A metric that first occurs later adds a column, which is empty in the rows before it.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[CSVLog("runs/digits.csv")])
    """

    is_passive = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = _Lines(path, "epoch,seconds", _epoch_of_row)
        self.path = self._lines.path
        self._columns: list[str] = []

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Begin an empty file after the init group."""
        if group == "init":
            self._cut(0)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Remove the rows of epochs that will run."""
        self._cut(epoch)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Add a row."""
        row = _row(epoch, seconds, metrics)
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        self._lines.append(_format_row([row.get(name) for name in self._columns]))

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than the rows."""
        self._lines.sync()

    def _cut(self, last: int) -> None:
        self._lines.cut(last)
        header = self._lines.read()[:1]
        self._columns = next(csv.reader(header)) if header else []

    def _widen(self, new: list[str]) -> None:
        rows = list(csv.reader(self._lines.read()))[1:]
        self._columns += new
        width = len(self._columns)
        wide = [row + [""] * (width - len(row)) for row in rows]
        self._lines.replace([_format_row(row) for row in (self._columns, *wide)])


@checked(path=PATH)
class JSONLinesLog(Callback):
    """Write a line for each epoch to a file: a JSON object with its number, seconds and metrics.

    NaN and infinities, which JSON lacks, are null. For all else see `CSVLog`.

    Parameters
    ----------
    path : str or os.PathLike

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[JSONLinesLog("runs/digits.jsonl")])
    """

    is_passive = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = _Lines(path, '{"epoch": ', _epoch_of_object)
        self.path = self._lines.path

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Begin an empty file after the init group."""
        if group == "init":
            self._lines.cut(0)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Remove the lines of epochs that will run."""
        self._lines.cut(epoch)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Add a line."""
        line = _row(epoch, seconds, metrics)
        self._lines.append(json.dumps({name: _or_null(value) for name, value in line.items()}))

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than the lines."""
        self._lines.sync()


def _row(epoch: int, seconds: float, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"epoch": epoch, "seconds": seconds, **plain_metrics(metrics)}


def _encode(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _epoch_of_row(line: str) -> int | None:
    first, second, *_ = next(csv.reader([line]))
    return None if (first, second) == ("epoch", "seconds") else int(first)


def _epoch_of_object(line: str) -> int:
    return int(json.loads(line)["epoch"])


def _format_row(values: list[Any]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="").writerow(
        printable(value, kept="") if isinstance(value, str) else value for value in values
    )
    return file.getvalue()


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
