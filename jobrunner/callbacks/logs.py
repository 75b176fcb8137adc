"""A file with a line for each epoch, right after crashes and resumes."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jobrunner.define import checked
from jobrunner.errors import DefinitionError
from jobrunner.outputs import open_output, write_output
from jobrunner.run import Callback
from jobrunner.texts import printable


@checked
class EpochLog(Callback):
    """Write a line for each epoch to a CSV or JSON lines file: its number, seconds and metrics.

    Parameters
    ----------
    path : str or os.PathLike
        Ends in ``.csv`` or ``.jsonl``. Its directory is made if there is none. A file that another
        program wrote is not touched: the log raises `ValueError`, which is a warning.

    Raises
    ------
    DefinitionError
        The path ends in something else.

    Notes
    -----
    The file has one line for each epoch that counts: a run that resumes, or recovers from a loss,
    first removes the lines of epochs after the one it loads, and a line that a crash has torn. A run
    that begins with the init group removes all. Lines are on disk before their epoch is recorded.
    A metric that first occurs later adds a column to a CSV file, which is empty in the rows before
    it. NaN and infinities, which JSON lacks, are null there. Arrays and images are left out.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[EpochLog("runs/digits.csv")])
    """

    is_passive = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        suffix = os.path.splitext(self.path)[1]
        if suffix not in (".csv", ".jsonl"):
            raise DefinitionError(
                f"EpochLog: path must end in .csv or .jsonl; got {self.path!r}. Name such a file."
            )
        self._format = _CSV() if suffix == ".csv" else _JSONLines()
        self._is_own = False  # nobody else wrote the file

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Begin an empty file after the init group."""
        if group == "init":
            self._read_lines()
            self._replace([])

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Remove the lines of epochs that will run."""
        kept = []
        for line in self._read_lines():
            line_epoch = self._format.epoch_of(line)
            if line_epoch is None or line_epoch <= epoch:
                kept.append(line)
        self._replace(kept if epoch else [])

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Add a line, which others can read at once."""
        plain = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, bool | int | float | str)
        }
        values = {"epoch": epoch, "seconds": seconds, **plain}
        if not self._is_own:
            self._read_lines()
        if self._format.lacks(values):
            self._replace(self._format.widened(self._read_lines(), values))
        data = _encode(self._format.line_of(values))
        with open_output(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if file.write(data) < len(data):
                # The disk is full. Half a line would look as if a crash had torn it.
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than the lines."""
        if self._is_own:
            with open_output(self.path, "rb") as file:
                os.fsync(file.fileno())

    def _read_lines(self) -> list[str]:
        """The whole lines, without their ends; raises ValueError for a file of somebody else."""
        text = ""
        try:
            with open_output(
                self.path, "r", encoding="utf-8", errors="replace", newline=""
            ) as file:
                text = file.read()
        except FileNotFoundError:
            pass
        *lines, torn = text.split("\n")
        if not lines and not self._format.start.startswith(torn[: len(self._format.start)]):
            raise self._foreign(torn)
        if lines and not lines[0].startswith(self._format.start):
            raise self._foreign(lines[0])
        for line in lines:
            try:
                self._format.epoch_of(line)
            except (ValueError, TypeError, KeyError) as error:
                raise self._foreign(line) from error
        self._is_own = True
        return lines

    def _foreign(self, line: str) -> ValueError:
        return ValueError(
            f"{self.path} contains the line {line!r:.100}, which this log does not write. Give the "
            f"log another path, or remove the file."
        )

    def _replace(self, lines: Sequence[str]) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        write_output(self.path, b"".join(map(_encode, lines)))
        self._format.begin(lines)


class _CSV:
    """How epochs are written as rows, and read back."""

    start = "epoch,seconds"
    """What the first line begins with."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    def begin(self, lines: Sequence[str]) -> None:
        """Note that the file has these lines now."""
        self._columns = next(csv.reader(lines[:1]), [])

    def epoch_of(self, line: str) -> int | None:
        """The epoch of a line, None for the header; raises an error for a line of somebody else."""
        first, second, *_ = next(csv.reader([line]))
        if (first, second) == ("epoch", "seconds"):
            return None
        return int(first)

    def lacks(self, values: Mapping[str, Any]) -> bool:
        """Whether columns are missing for these values."""
        return not values.keys() <= set(self._columns)

    def widened(self, lines: Sequence[str], values: Mapping[str, Any]) -> list[str]:
        """The lines with columns for these values."""
        header, *rows = list(csv.reader(lines)) or [[]]
        columns = header + [name for name in values if name not in header]
        wide_rows = [row + [""] * (len(columns) - len(row)) for row in rows]
        return [_csv_line(row) for row in (columns, *wide_rows)]

    def line_of(self, values: Mapping[str, Any]) -> str:
        """The row of an epoch."""
        return _csv_line([values.get(name) for name in self._columns])


class _JSONLines:
    """How epochs are written as JSON objects, and read back; as `_CSV`, but without columns."""

    start = '{"epoch": '

    def begin(self, lines: Sequence[str]) -> None:
        """Do nothing: lines do not depend on those before them."""

    def epoch_of(self, line: str) -> int | None:
        """The epoch of a line."""
        return int(json.loads(line)["epoch"])

    def lacks(self, values: Mapping[str, Any]) -> bool:
        """Never: each line has names of its own."""
        return False

    def widened(self, lines: Sequence[str], values: Mapping[str, Any]) -> list[str]:
        """The lines as they are."""
        return list(lines)

    def line_of(self, values: Mapping[str, Any]) -> str:
        """The JSON object of an epoch."""
        finite = {}
        for name, value in values.items():
            is_null = isinstance(value, float) and not math.isfinite(value)
            finite[name] = None if is_null else value
        return json.dumps(finite)


def _csv_line(values: Sequence[Any]) -> str:
    file = io.StringIO()
    # A line of the file is a row: line ends within texts are written as \\n.
    plain = [printable(value, kept="") if isinstance(value, str) else value for value in values]
    csv.writer(file, lineterminator="").writerow(plain)
    return file.getvalue()


def _encode(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")
