"""Reading from loaders that save their own state."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from jobrunner.data.cursors import Setup, reduced
from jobrunner.data.pass_position import check_state, end_of
from jobrunner.data.reader import DataReader, reader_of
from jobrunner.data.sources import is_of
from jobrunner.define import FLAG, NATURAL, instance
from jobrunner.errors import DefinitionError, PlanMismatchError

_END = object()


def from_loader(loader: Any) -> DataReader:
    """A reader of a loader that saves its own state, such as torchdata's `StatefulDataLoader`.

    Parameters
    ----------
    loader : object
        Is iterated over once for each pass, and has ``state_dict()`` and ``load_state_dict()``.

    Raises
    ------
    DefinitionError
        If it has none of these.

    Notes
    -----
    The loader makes the batches, shuffles, divides the data and reads ahead: give each node a loader
    of its own part. Its state is of no use to another number of nodes. If it has no length,
    `finished` is true only after a `read` that found no more.

    A stream of Hugging Face (`datasets.IterableDataset`) gets the number of each pass by its
    ``set_epoch``, so that ``shuffle`` has another order in each. What its shuffle buffer held is
    lost when a run resumes in mid-pass.
    """
    missing = [
        name
        for name in ("__iter__", "state_dict", "load_state_dict")
        if not callable(getattr(type(loader), name, None))
    ]
    if missing:
        raise DefinitionError(
            f"from_loader: loader must have a state; the {type(loader).__name__} lacks {missing}. In "
            f"place of PyTorch's DataLoader use torchdata's StatefulDataLoader (pip install "
            f"'dask-jobrunner[torchdata]'), from_records(dataset), or from_iterable with a function "
            f"that returns the loader of a pass, seeded by the pass's number."
        )
    return reader_of(Loaded, loader)


class Loaded:
    """The cursor of a loader, and its position."""

    ready = ()  # nothing is, before it is read
    fill = None

    def __init__(self, setup: Setup) -> None:
        if setup != Setup(setup.kind, setup.source):
            raise DefinitionError(
                "DataReader: a reader of from_loader cannot be shuffled, sharded, batched or "
                "prefetched. Let the loader do so."
            )
        self.setup, self._loader = setup, setup.source
        self._is_stream = is_of(setup.source, "datasets")
        self._lock = threading.Lock()
        self._number, self._taken, self.has_ended = 0, 0, False
        self._items: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None  # a state from before what is read
        if self._is_stream:
            self._begin_stream()

    __reduce__ = reduced

    @property
    def position(self) -> Loaded:
        """Itself."""
        return self

    def read(self) -> Any:
        """The loader's next item."""
        with self._lock:
            if self.has_ended:
                raise end_of(self._number)
            try:
                items = self._open() if self._items is None else self._items
                item = next(items, _END)
                # The loader's state says that it was the last one only when asked for more.
                is_last = item is _END or self._taken + 1 == self._length()
                if is_last and item is not _END and next(items, _END) is not _END:
                    raise DefinitionError(
                        f"Pass {self._number}: expected {self._taken + 1} items of the loader, which "
                        f"is its length; found more. Make its __len__ right, or raise TypeError there."
                    )
            except BaseException:
                self._items = None  # the next read tries again
                raise
            if is_last:
                self.has_ended, self._items, self._start = True, None, None
            if item is _END:
                raise end_of(self._number)
            self._taken += 1
            return item

    def _open(self) -> Iterator[Any]:
        """Begin the pass, or again after an error: from the last known state on, without what was read."""
        taken = self._taken
        try:
            if self._start is not None:
                self._load(self._start)
            if self._items is None:
                self._items = iter(self._loader)
            self._start = self._start or self._state()
            for _ in range(taken - self._taken):
                next(self._items, None)
        finally:
            self._taken = taken
        return self._items

    def _length(self) -> int | None:
        try:
            return self.count()
        except TypeError:
            return None

    def count(self) -> int:
        """How many items a whole pass has, if the loader knows."""
        count: int = len(self._loader)
        return count

    def _generator(self) -> Any:
        """The generator of random numbers that a loader of PyTorch was given, if any."""
        generator = getattr(self._loader, "generator", None)
        return generator if hasattr(generator, "set_state") else None

    def begin(self) -> None:
        """Begin the next pass, unless another thread has."""
        with self._lock:
            if not self.has_ended:
                return
            self._number, self._taken, self.has_ended = self._number + 1, 0, False
            if self._is_stream:
                self._begin_stream()

    def _begin_stream(self) -> None:
        # A copy, because a stream begins each pass with the state that it has once loaded.
        self._loader, self._items = copy(self.setup.source), None
        self._loader.set_epoch(self._number)

    def state_dict(self) -> dict[str, Any]:
        """The number of the pass, how many items of it were read, and the loader's state."""
        with self._lock:
            return self._state()

    def _state(self) -> dict[str, Any]:
        start = self._start or {"taken": None}
        # Until it is read from, a stream does not tell the state that it has loaded.
        is_read = start["taken"] != self._taken
        return {
            "pass": self._number,
            "taken": self._taken,
            "finished": self.has_ended,
            # Its state first: the loader may draw numbers to make one.
            "loader": self._loader.state_dict() if is_read else start["loader"],
            "generator": None if (own := self._generator()) is None else own.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        check_state(
            state,
            {
                "pass": NATURAL,
                "taken": NATURAL,
                "finished": FLAG,
                "loader": instance("a dict", dict),
                "generator": instance("the state of a generator", object),
            },
            "the state",
        )
        with self._lock:
            self._load(state)
            self._start = None if self.has_ended else state

    def _load(self, state: dict[str, Any]) -> None:
        self._number, self._taken = state["pass"], state["taken"]
        self.has_ended = state["finished"]
        if self._is_stream:
            self._begin_stream()
        if not self._is_stream or self._taken:
            self._loader.load_state_dict(state["loader"])
        # This takes the loader to its state, or to the next pass if the state is an end.
        self._items = iter(self._loader)
        if (own := self._generator()) is not None and state["generator"] is not None:
            # PyTorch's loaders draw from it between passes, which their states do not tell.
            own.set_state(state["generator"])
            if self.has_ended:
                self._items = None  # it came from another state of the generator

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Raise `PlanMismatchError`."""
        raise PlanMismatchError(
            f"The states of {len(states)} loaders cannot be shared out among another number of nodes: "
            f"expected as many nodes as saved them. Read the data with from_records or from_iterable."
        )
