"""What a reader is, and how loops use one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from jobrunner.define import COUNT, INTERVAL, checked
from jobrunner.errors import EndOfData, PlanMismatchError


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


class Loop:
    """What loops need of readers that can `_begin` the next pass."""

    if TYPE_CHECKING:
        # What a reader has of its own.
        @property
        def finished(self) -> bool:
            """Whether the pass has ended and the next has not begun."""

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
            After this time the loop reads no further batch; it reads at least one.
        """
        return LimitedReader(self, batches=batches, seconds=seconds)


class LimitedReader:
    """Another reader, for loops that end after some batches or some time.

    Made by `limited`. Each loop (``for batch in reader``) counts anew. `finished` and the position
    are those of the other reader: they tell of the pass, not of the loop.
    """

    def __init__(self, reader: Reader, *, batches: int | None, seconds: float | None) -> None:
        self._reader = reader
        self._batches, self._seconds = batches, seconds
        self._taken = 0
        self._started: float | None = None  # with the loop's first read
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether the pass, not only the loop, has ended and the next has not begun."""
        return self._reader.finished

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the loop or the pass."""
        with self._lock:
            self._check()
            self._taken += 1
        try:
            return self._reader.read()
        except BaseException:
            with self._lock:
                self._taken -= 1
            raise

    def _check(self) -> None:
        now = time.monotonic()
        if self._started is None:
            self._started = now
        if self._batches is not None and self._taken >= self._batches:
            raise EndOfData(f"The loop has read {self._batches} batches; the next loop goes on.")
        if self._seconds is not None and now - self._started >= self._seconds:
            raise EndOfData(f"The loop has read for {self._seconds:g} s; the next loop goes on.")

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self._reader, self._batches, self._seconds, self._taken)
        return (_limited, args)

    def state_dict(self) -> dict[str, Any]:
        """The position of the other reader, and how many batches the loop has read."""
        return {"reader": self._reader.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The time of a loop counts anew."""
        check_fields(state, {"reader": dict, "taken": int})
        self._reader.load_state_dict(state["reader"])
        self._taken, self._started = state["taken"], None

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order. The loop counts anew."""
        for state in states:
            check_fields(state, {"reader": dict, "taken": int})
        merge = getattr(self._reader, "merge_state_dicts", None)
        if merge is None:
            raise PlanMismatchError(
                f"The position of a {type(self._reader).__name__} cannot be shared out among another "
                f"number of nodes."
            )
        return {"reader": merge([state["reader"] for state in states]), "taken": 0}

    def __iter__(self) -> Self:
        iter(self._reader)
        self._taken, self._started = 0, None
        return self

    def __next__(self) -> Any:
        try:
            return self.read()
        except EndOfData:
            raise StopIteration from None


def _limited(
    reader: Reader, batches: int | None, seconds: float | None, taken: int
) -> LimitedReader:
    limited = LimitedReader(reader, batches=batches, seconds=seconds)
    limited._taken = taken
    return limited


def check_fields(state: object, fields: dict[str, type]) -> None:
    """Raise `PlanMismatchError` if a state has not these fields of these types; ints are >= 0."""
    found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or found != sorted(fields):
        raise PlanMismatchError(
            f"The state is not one of this reader: expected the fields {sorted(fields)}, found "
            f"{found!s:.500}. Load a state that a reader of the same kind has made."
        )
    for name, kind in fields.items():
        value = state[name]
        is_right = isinstance(value, kind)
        if isinstance(value, int) and kind is int:
            is_right = not isinstance(value, bool) and value >= 0
        if not is_right:
            expected = "an int >= 0" if kind is int else f"a {kind.__name__}"
            raise PlanMismatchError(
                f"The state, field {name!r}: expected {expected}, found {value!r:.200}."
            )
