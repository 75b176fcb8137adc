"""Readers of loaders that save their own state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from jobrunner.data.protocol import Loop, check_fields
from jobrunner.errors import DefinitionError, EndOfData

_END = object()


def from_loader(loader: Any) -> LoaderReader:
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
    The loader makes the batches, shuffles and divides the data: give each node a loader of its own
    part. Its state is of no use to another number of nodes. If it has no length, `finished` is true
    only after a `read` that found no more.
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
    return LoaderReader(loader)


class LoaderReader(Loop):
    """Reads what a loader yields. See `Reader` for what all readers do. Made by `from_loader`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._lock = threading.Lock()
        self._number, self._taken, self._finished = 0, 0, False
        self._items: Iterator[Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        return self._finished

    def read(self) -> Any:
        """The loader's next item. Raises `EndOfData` at the end of the pass, until the next one."""
        with self._lock:
            if self._finished:
                raise self._end()
            if self._items is None:
                self._items = iter(self._loader)
            item = next(self._items, _END)
            if item is _END:
                self._finished, self._items = True, None
                raise self._end()
            self._taken += 1
            if self._taken == self._length():
                # The loader's state says so too only when it was asked for more.
                if next(self._items, _END) is not _END:
                    raise DefinitionError(
                        f"Pass {self._number}: expected {self._taken} items of the loader, which is "
                        f"its length; found more. Make its __len__ right, or raise TypeError there."
                    )
                self._finished, self._items = True, None
            return item

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:
            return None

    def _generator(self) -> Any:
        """The generator of random numbers that a loader of PyTorch was given, if any."""
        generator = getattr(self._loader, "generator", None)
        return generator if hasattr(generator, "set_state") else None

    def _end(self) -> EndOfData:
        return EndOfData(
            f"Pass {self._number} has ended. To begin the next one, iterate over the reader: "
            f"for batch in reader."
        )

    def _begin(self) -> None:
        with self._lock:
            self._number, self._taken, self._finished = self._number + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The number of the pass, how many items of it were read, and the loader's state."""
        with self._lock:
            return {
                "pass": self._number,
                "taken": self._taken,
                "finished": self._finished,
                # Its state first: the loader may draw numbers to make one.
                "loader": self._loader.state_dict(),
                "generator": None if (own := self._generator()) is None else own.get_state(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises `PlanMismatchError` if the state is of another reader."""
        fields = {"pass": int, "taken": int, "finished": bool, "loader": dict, "generator": object}
        check_fields(state, fields)
        with self._lock:
            self._loader.load_state_dict(state["loader"])
            self._number, self._taken = state["pass"], state["taken"]
            self._finished = state["finished"]
            # This takes the loader to its state, or to the next pass if the state is an end.
            self._items = iter(self._loader)
            if (own := self._generator()) is not None and state["generator"] is not None:
                # PyTorch's loaders draw from it between passes, which their states do not tell.
                own.set_state(state["generator"])
                if self._finished:
                    self._items = None  # it came from another state of the generator

    def __len__(self) -> int:
        """How many items a whole pass has, if the loader knows."""
        return len(self._loader)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._loader, self.state_dict()))


def _rebuild(loader: Any, state: dict[str, Any]) -> LoaderReader:
    reader = LoaderReader(loader)
    reader.load_state_dict(state)
    return reader
