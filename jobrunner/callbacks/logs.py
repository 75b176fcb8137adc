"""A file with a line for each epoch, right after crashes and resumes."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Mapping
from typing import Any

from jobrunner.define import checked
from jobrunner.errors import DefinitionError
from jobrunner.json_output import to_json
from jobrunner.outputs import check_rights, write_output
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
        The path ends in something else, or this user may not write there.

    Notes
    -----
    The file has one line for each epoch that counts: a run that resumes, or recovers from a loss,
    first removes the lines of epochs after the one it loads, and a line that a crash has torn. A run
    that begins with the init group removes all. Lines are on disk before their epoch is recorded.
    A metric that first occurs later adds a column to a CSV file, which is empty in the rows before
    it. NaN and infinities, which JSON lacks, are null there.

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
        check_rights(self.path)
        self._is_csv = suffix == ".csv"
        self._columns: list[str] = []  # of a CSV file
        self._is_own = False  # nobody else wrote the file

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Begin an empty file after the init group."""
        if group == "init":
            self._read_rows()
            self._columns = []
            self._replace([])

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Remove the lines of epochs that will run."""
        kept = []
        for row in self._read_rows():
            if int(row["epoch"]) <= epoch:  # there is none of epoch 0
                kept.append(row)
        if not kept:
            self._columns = []
        self._replace(kept)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Add a line, which others can read at once."""
        values: dict[str, Any] = {"epoch": epoch, "seconds": seconds}
        for name, value in metrics.items():
            if isinstance(value, bool | int | float | str):
                values[name] = value
        if not self._is_own:
            self._read_rows()
        new = [name for name in values if name not in self._columns]
        if self._is_csv and new:
            rows = self._read_rows()
            self._columns += new
            self._replace(rows)
        data = self._encode(values)
        with open(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if file.write(data) < len(data):
                # The disk is full. Half a line would look as if a crash had torn it.
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def on_save_start(self, epoch: int, step: int) -> None:
        """Let no record be newer than the lines."""
        if self._is_own:
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def _read_rows(self) -> list[dict[str, Any]]:
        """The values of each whole line; raises ValueError for a file of somebody else."""
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with open(self.path, "a+", encoding="utf-8", errors="replace", newline="") as file:
            file.seek(0)
            text = file.read()
        lines = text.split("\n")[:-1]  # a crash may have torn the last one
        first = text.partition("\n")[0]
        start = "epoch,seconds" if self._is_csv else '{"epoch": '
        # A crash may have torn even the first line.
        is_own = text[: len(start)] == start[: len(text)]
        rows: list[dict[str, Any]] = []
        try:
            if self._is_csv:
                reader = csv.DictReader(lines)
                self._columns = [*(reader.fieldnames or [])]
                rows = list(reader)
            else:
                rows = [json.loads(line) for line in lines]
            for row in rows:
                int(row["epoch"])
        except (ValueError, TypeError, KeyError):
            is_own = False
        if not is_own:
            raise ValueError(
                f"{self.path} contains the line {first!r:.100}, or others that this "
                f"log does not write. Give the log another path, or remove the file."
            )
        self._is_own = True
        return rows

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        if self._columns:
            rows = [dict(zip(self._columns, self._columns, strict=True)), *rows]
        write_output(self.path, b"".join(map(self._encode, rows)))

    def _encode(self, values: Mapping[str, Any]) -> bytes:
        """The line of an epoch."""
        if self._is_csv:
            file = io.StringIO()
            # A line of the file is a row: line ends within texts are written as \\n.
            cells = []
            for name in self._columns:
                value = values.get(name)
                if isinstance(value, str):
                    value = printable(value, kept="")
                cells.append(value)
            csv.writer(file, lineterminator="").writerow(cells)
            line = file.getvalue()
        else:
            line = json.dumps(to_json(values))
        return f"{line}\n".encode(errors="backslashreplace")
