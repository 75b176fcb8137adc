"""Reading from loaders that save their own state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobrunner.data.reader import AS_STORED, DataReader, Options, end_of
from jobrunner.data.saved_state import SavedReader
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
    of its own part. Its state is of no use to another number of nodes. `finished`
    is true only after a `read` that found no more. After an error, the reader is of no more use: let
    the run resume.
    """
    missing = []
    for name in ("__iter__", "state_dict", "load_state_dict"):
        if not callable(getattr(type(loader), name, None)):
            missing.append(name)
    if missing:
        raise DefinitionError(
            f"from_loader: loader must have a state; the {type(loader).__name__} lacks {missing}. In "
            f"place of PyTorch's DataLoader use torchdata's StatefulDataLoader (pip install "
            f"'dask-jobrunner[torchdata]'), from_records(dataset), or from_iterable with a function "
            f"that returns the loader of a pass, seeded by the pass's number."
        )
    return LoaderReader(loader)


class SavedLoader(SavedReader, kw_only=True):
    """A `state_dict` of a reader of a loader."""

    finished: bool
    loader: dict[Any, Any]
    generator: Any = None


class LoaderReader(DataReader):
    """Iterates over a loader, whose state is its position."""

    def __init__(self, source: Any, options: Options = AS_STORED) -> None:
        if options != AS_STORED:
            raise DefinitionError(
                "DataReader: a reader of from_loader cannot be shuffled, sharded, batched or "
                "prefetched. Let the loader do so."
            )
        super().__init__(source, options)
        self._number, self._is_finished = 0, False
        self._items: Iterator[Any] | None = None
        self._failure: BaseException | None = None

    def read(self) -> Any:
        """The next record or batch."""
        with self._lock:
            if self._is_finished:
                raise end_of(self._number)
            self._check_failure()
            try:
                if self._items is None:
                    self._items = iter(self._source)
                item = next(self._items, _END)
            except BaseException as error:
                # The iterator would say that the pass has ended.
                self._failure = error
                raise
            if item is _END:
                self._is_finished, self._items = True, None
                raise end_of(self._number)
            return item

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"Pass {self._number}: the loader has failed before ({self._failure!r:.200}), so what "
                f"comes next is not known. Let the task fail, and the run resume."
            )

    def __len__(self) -> int:
        return len(self._source)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        with self._lock:
            self._check_failure()
            # Before that of the generator: the loader may draw numbers to make its state.
            loader = self._source.state_dict()
            own = self._generator()
            return {
                "pass": self._number,
                "finished": self._is_finished,
                "loader": loader,
                "generator": None if own is None else own.get_state(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        saved = SavedLoader.read(state)
        with self._lock:
            self._source.load_state_dict(saved.loader)
            self._number, self._is_finished = saved.number, saved.finished
            self._failure = None
            # This takes the loader to its state, or to the next pass if the state is an end.
            self._items = iter(self._source)
            own = self._generator()
            if own is not None and saved.generator is not None:
                # PyTorch's loaders draw from it between passes, which their states do not tell.
                own.set_state(saved.generator)
                if saved.finished:
                    self._items = None  # it came from another state of the generator

    def _generator(self) -> Any:
        """The generator of random numbers that a loader of PyTorch was given, if any."""
        generator = getattr(self._source, "generator", None)
        return generator if hasattr(generator, "set_state") else None

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Raise `PlanMismatchError`."""
        raise PlanMismatchError(
            f"The states of {len(states)} loaders cannot be shared out among another number of nodes: "
            f"expected as many nodes as saved them. Read the data with from_records or from_iterable."
        )

    def _has_ended(self) -> bool:
        return self._is_finished

    def _begin(self) -> None:
        self._number, self._is_finished = self._number + 1, False
