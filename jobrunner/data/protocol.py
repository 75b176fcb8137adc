"""What a reader is, and what all readers of this package have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from jobrunner.define import COUNT, INTERVAL, checked
from jobrunner.errors import EndOfData

if TYPE_CHECKING:
    from jobrunner.data.limit import LimitedReader


@runtime_checkable
class Reader(Protocol):
    """Reads records, pass after pass, and knows its position.

    As a blob, a reader is saved by its position: its data is not. An init task makes it, and the
    tasks that read name it in ``updates=``.

    ``for item in reader`` reads the rest of the pass. It begins the next pass if the last one has
    ended.
    """

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to the position that a `state_dict` describes."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...


class Reading:
    """Iteration, and limits, of readers that can `_begin` the next pass."""

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        raise AttributeError

    if TYPE_CHECKING:
        # What a reader has of its own.
        read: Callable[[], Any]
        state_dict: Callable[[], dict[str, Any]]
        load_state_dict: Callable[[dict[str, Any]], None]
        _begin: Callable[[], None]

    def __iter__(self) -> Self:
        if self.finished:
            self._begin()
        return self

    def __next__(self) -> Any:
        try:
            return self.read()
        except EndOfData:
            raise StopIteration from None

    @checked(batches=COUNT, seconds=INTERVAL)
    def limited(self, *, batches: int | None = None, seconds: float | None = None) -> LimitedReader:
        """Return a reader for loops that end sooner; the pass goes on in the next loop.

        It shares the position with this one. Call it last:
        ``for batch in reader.limited(batches=100)``.

        Parameters
        ----------
        batches : int, optional
            How many batches (or records, if there are no batches) a loop reads at most.
        seconds : float, optional
            After this time the loop reads no further batch; it reads at least one. it reads at least one.
        """
        from jobrunner.data.limit import LimitedReader

        return LimitedReader(self, batches=batches, seconds=seconds)
