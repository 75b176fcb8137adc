"""Reading from loaders that save their own state."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from jobrunner.data.reader import DataReader, Options
from jobrunner.data.rows import is_of
from jobrunner.data.saved_state import SavedInt, SavedState, end_of
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
    return DataReader(partial(LoaderCursor, loader))


class SavedLoader(SavedState, kw_only=True):
    """A `state_dict` of a reader of a loader."""

    num_taken: SavedInt  # items of the pass
    finished: bool
    loader: dict[Any, Any]
    generator: Any = None


class LoaderCursor:
    """Iterates over a loader. It is its own position, since the loader's state is one.

    After an error, the next read goes back to `_start`, the newest state of the loader from before
    what it has read, and skips what was handed out since.
    """

    def __init__(self, loader: Any, options: Options) -> None:
        if replace(options, loop_batches=None, loop_seconds=None) != Options():
            raise DefinitionError(
                "DataReader: a reader of from_loader cannot be shuffled, sharded, batched or "
                "prefetched. Let the loader do so."
            )
        self._given = self._loader = loader
        self._is_stream = is_of(loader, "datasets")
        self.lock = threading.Lock()
        self._number, self._num_taken, self.has_ended = 0, 0, False
        self._items: Iterator[Any] | None = None
        self._start: SavedLoader | None = None
        self._begin_stream()

    @property
    def position(self) -> LoaderCursor:
        """Itself."""
        return self

    def read(self) -> Any:
        """The loader's next item."""
        with self.lock:
            if self.has_ended:
                raise end_of(self._number)
            try:
                items = self._open() if self._items is None else self._items
                item = next(items, _END)
                is_last = item is _END or self._is_last(items)
            except BaseException:
                self._items = None  # the next read tries again
                raise
            if is_last:
                self.has_ended, self._items, self._start = True, None, None
            if item is _END:
                raise end_of(self._number)
            self._num_taken += 1
            return item

    def _is_last(self, items: Iterator[Any]) -> bool:
        """Whether the loader's length says so. Then the loader is asked for more, too.

        It must not have any. And only then does its state say that the pass has ended.
        """
        try:
            if self._num_taken + 1 != self.count():
                return False
        except TypeError:
            return False
        if next(items, _END) is not _END:
            raise DefinitionError(
                f"Pass {self._number}: expected {self._num_taken + 1} items of the loader, which is its "
                f"length; found more. Make its __len__ right, or raise TypeError there."
            )
        return True

    def _open(self) -> Iterator[Any]:
        """Begin the pass, or go on after an error."""
        num_taken = self._num_taken
        try:
            if self._start is not None:
                self._load(self._start)
            if self._items is None:
                self._items = iter(self._loader)
            self._start = self._start or self._state()
            for _ in range(num_taken - self._num_taken):
                next(self._items, None)
        finally:
            self._num_taken = num_taken
        return self._items

    def count(self) -> int:
        """How many items a whole pass has, if the loader knows."""
        return len(self._loader)

    def begin(self) -> None:
        """Begin the next pass."""
        self._number, self._num_taken, self.has_ended = self._number + 1, 0, False
        self._begin_stream()

    def _begin_stream(self) -> None:
        if self._is_stream:
            # A copy, because a stream begins each pass with the state that it has once loaded.
            self._loader, self._items = copy(self._given), None
            self._loader.set_epoch(self._number)

    def state_dict(self) -> dict[str, Any]:
        """The number of the pass, how many items of it were read, and the loader's state."""
        state = self._state()
        # Not by `write`, which would change what the loader has in its state.
        return {
            "pass": state.number,
            "num_taken": state.num_taken,
            "finished": state.finished,
            "loader": state.loader,
            "generator": state.generator,
        }

    def _state(self) -> SavedLoader:
        if self._start is not None and self._start.num_taken == self._num_taken:
            loader = (
                self._start.loader
            )  # a stream tells no state that it has loaded until it is read
        else:
            # Before that of the generator: the loader may draw numbers to make its state.
            loader = self._loader.state_dict()
        own = self._generator()
        return SavedLoader(
            number=self._number,
            num_taken=self._num_taken,
            finished=self.has_ended,
            loader=loader,
            generator=None if own is None else own.get_state(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        saved = SavedLoader.read(state)
        self._load(saved)
        self._start = None if self.has_ended else saved

    def _load(self, state: SavedLoader) -> None:
        self._number, self._num_taken = state.number, state.num_taken
        self.has_ended = state.finished
        self._begin_stream()
        if not self._is_stream or self._num_taken:
            self._loader.load_state_dict(state.loader)
        # This takes the loader to its state, or to the next pass if the state is an end.
        self._items = iter(self._loader)
        own = self._generator()
        if own is not None and state.generator is not None:
            # PyTorch's loaders draw from it between passes, which their states do not tell.
            own.set_state(state.generator)
            if self.has_ended:
                self._items = None  # it came from another state of the generator

    def _generator(self) -> Any:
        """The generator of random numbers that a loader of PyTorch was given, if any."""
        generator = getattr(self._loader, "generator", None)
        return generator if hasattr(generator, "set_state") else None

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Raise `PlanMismatchError`."""
        raise PlanMismatchError(
            f"The states of {len(states)} loaders cannot be shared out among another number of nodes: "
            f"expected as many nodes as saved them. Read the data with from_records or from_iterable."
        )
