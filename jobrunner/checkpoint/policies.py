"""Which recorded epochs are kept. Pure: decides, deletes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from jobrunner.errors import DefinitionError


class RetentionPolicy(Protocol):
    """Says which epochs to give up after a commit.

    The newest recorded epoch and the one that was resumed from are kept whatever it says.
    """

    def retires(self, epochs: Sequence[int]) -> Collection[int]:
        """Those of `epochs`, all that are recorded in ascending order, to be given up."""


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep every epoch."""

    def retires(self, epochs: Sequence[int]) -> Collection[int]:
        """See `RetentionPolicy`."""
        return ()


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest epochs.

    Parameters
    ----------
    n : int
        How many, from 1 on.

    Examples
    --------
    >>> list(KeepLast(2).retires([0, 1, 2, 3]))
    [0, 1]
    """

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise DefinitionError(f"KeepLast: n is an int from 1 on; got {self.n!r}.")

    def retires(self, epochs: Sequence[int]) -> Collection[int]:
        """See `RetentionPolicy`."""
        return epochs[: max(0, len(epochs) - self.n)]
