"""The rows that tasks put in a history of a node, until they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.errors import DefinitionError

_NUMBERS = {bool: "bool", int: "int", float: "float", complex: "complex"}
_MOST_BYTES = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16, "m": 8, "M": 8}
"""Kinds of dtypes that every reader of Zarr knows, and the largest of each."""


@dataclass(eq=False, slots=True)
class Rows:
    """The rows of a history: those that nobody has taken yet, and how many there are.

    A task's thread puts values, and at the end of the run the last one becomes rows. Another thread
    takes them from the begin of `pending`, and writes them.
    """

    name: str
    extends: bool
    """A value is rows along its first axis; else it is one row."""
    dtype: np.dtype[Any] | None = None
    """Of all rows; None: there is no value yet."""
    shape: tuple[int, ...] = ()
    """Of a row."""
    count: int = 0
    last: int | None = None
    """How many of them the last value has; None: no task has put any."""
    holds: str = "array"
    """What that value is: "array", "scalar" of NumPy, or the name of a number's type."""
    pending: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """Rows, each time with how many there are up to their end. They are at rest."""
    origin: Any = None
    """What a load has found, for whoever writes the rows after it."""
    _fresh: tuple[np.ndarray, str] | None = None

    def put(self, stored: Any, where: str) -> Any:
        """Take a value, instead of the one before of this run; returns it as the blob keeps it.

        Raises DefinitionError, which begins with `where`, if it cannot be rows of this history.
        """
        value, holds = stored, "array"
        if type(stored) in _NUMBERS or isinstance(stored, np.generic):
            holds = _NUMBERS.get(type(stored), "scalar")
            value = np.asarray(stored)
        expected = "arrays or numbers of at most 64 bits, 128 if complex"
        if type(value) is not np.ndarray:
            raise self._refuse(where, expected, type(value))
        if value.dtype.itemsize > _MOST_BYTES.get(value.dtype.kind, 0):
            raise self._refuse(where, expected, f"an array of {value.dtype}")
        if self.extends and not value.ndim:
            raise self._refuse(where, "arrays whose first axis are rows", f"one {value.dtype}")
        shape = value.shape
        if self.extends:
            shape = shape[1:]
        if 0 in shape:
            raise self._refuse(where, "rows with items", f"rows of shape {shape}")
        if self.dtype is None:
            self.dtype, self.shape = value.dtype, shape
        elif (self.dtype, self.shape) != (value.dtype, shape):
            expected = f"rows of {self.dtype} and shape {self.shape}, as those before"
            raise self._refuse(where, expected, f"{value.dtype} and shape {shape}")
        if not value.flags.c_contiguous:
            # A load could not bring another order back, and sums would have other last bits.
            stored = value = np.ascontiguousarray(value)
            value.flags.writeable = False
        self._fresh = value if self.extends else value[np.newaxis], holds
        return stored

    def _refuse(self, where: str, expected: str, present: object) -> DefinitionError:
        return DefinitionError(
            f"{where}: blob {self.name!r} is a history: expected {expected}; found {present}. "
            f"Convert the value, or declare the blob without history=."
        )

    def begin_run(self) -> None:
        """Forget what a task has put in a run that was aborted."""
        self._fresh = None

    def end_run(self) -> None:
        """Make rows of the last value of the run."""
        if self._fresh is not None:
            rows, self.holds = self._fresh
            self.last = len(rows)
            self.count += len(rows)
            if len(rows):
                self.pending.append((self.count, rows))
        self._fresh = None

    def take(self, count: int) -> list[np.ndarray]:
        """Return and drop what is pending of the first `count` rows."""
        pieces = [rows for end, rows in self.pending[:] if end <= count]
        del self.pending[: len(pieces)]
        return pieces

    def pending_bytes(self, after: int) -> int:
        """The size of what is not written and comes after the first `after` rows."""
        return sum(rows.nbytes for end, rows in self.pending[:] if end > after)

    def continue_from(self, loaded: Rows) -> None:
        """Go on from the rows of a checkpoint."""
        self.dtype, self.shape, self.count = loaded.dtype, loaded.shape, loaded.count
        self.last, self.holds, self.origin = loaded.last, loaded.holds, loaded.origin
        self.pending, self._fresh = [], None
