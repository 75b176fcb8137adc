"""Pickles of values for other nodes and workers. No Dask."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from jobrunner.gc_pause import gc_paused

_PAUSED_BYTES = 100_000
"""Shorter pickles make few objects."""


class NotPicklableError(TypeError):
    """A value that cannot leave its node, since it cannot be pickled."""


class Pickled:
    """A value as it was when it was pickled. Each reader gets a copy; arrays may share memory."""

    __slots__ = ("frames",)

    def __init__(self, frames: Sequence[Any]) -> None:
        self.frames = frames


def to_frames(captured: Any) -> list[Any]:
    """Pickle a captured value for `from_frames`, with its large buffers apart, not copied."""
    if type(captured) is Pickled:
        return list(captured.frames)
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(captured, buffers)
    return [head, *(buffer.raw() for buffer in buffers)]


def received(frames: Sequence[Any]) -> Pickled:
    """What has come from another worker: all its readers share its memory, so none may write."""
    return Pickled([memoryview(frame).toreadonly() for frame in frames])


def from_frames(frames: Sequence[Any]) -> Any:
    """Unpickle a value; its arrays use the memory of `frames`."""
    if len(frames[0]) <= _PAUSED_BYTES:
        return pickle.loads(frames[0], buffers=frames[1:])
    with gc_paused():
        return pickle.loads(frames[0], buffers=frames[1:])


def copied(value: Any) -> Any:
    """A copy of a value that shares no memory with it, and whose arrays are aligned."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy(order="K")
    head, *buffers = to_frames(value)
    return from_frames([head, *map(np.array, buffers)])


def dumps_definitions(value: Any) -> bytes:
    """Pickle functions and what they refer to; those of a script or a notebook by value."""
    file = io.BytesIO()
    _CloudPickler(file, protocol=5).dump(value)
    return file.getvalue()


def dumps(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickle a value; with `buffers`, its large buffers go there."""
    keep = None if buffers is None else buffers.append
    file = io.BytesIO()
    try:
        _Pickler(file, 5, buffer_callback=keep).dump(value)
    except Exception:  # definitions of a script or a notebook are pickled by value
        if buffers is not None:
            buffers.clear()
        file = io.BytesIO()
        _CloudPickler(file, 5, buffer_callback=keep).dump(value)
    return file.getvalue()


def _reduce_array(array: np.ndarray) -> Any:
    """Keep the byte order, which NumPy's own pickles lose for dates and for slices."""
    dtype = array.dtype
    if dtype.isnative or dtype.names is not None:
        return array.__reduce_ex__(5)
    return _as_dtype, (array.view(dtype.newbyteorder("=")), dtype.str, dict(dtype.metadata or {}))


def _as_dtype(array: np.ndarray, name: str, metadata: dict[str, Any]) -> np.ndarray:
    return array.view(np.dtype(name, metadata=metadata) if metadata else name)


def _refuse_memoryview(view: memoryview) -> Any:
    raise TypeError("a memoryview would arrive as bytes: pass bytes(...) or np.asarray(...)")


_REDUCERS: Any = {np.ndarray: _reduce_array, memoryview: _refuse_memoryview}


class _Pickler(pickle.Pickler):
    dispatch_table: Any = ChainMap(_REDUCERS, copyreg.dispatch_table)  # noqa: RUF012  # as the base class has it


def _reduce_code(code: CodeType) -> Any:
    """Keep the name of the file, which cloudpickle forgets, for tracebacks."""
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (code.co_filename, make, args)


def _make_code(file: str, make: Callable[..., CodeType], args: Sequence[Any]) -> CodeType:
    return make(*args).replace(co_filename=file)


_CLOUD_REDUCERS: Any = {**_REDUCERS, CodeType: _reduce_code}


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    dispatch_table: ClassVar[Any] = ChainMap(_CLOUD_REDUCERS, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """Keep the place of a class that is inside another one, which cloudpickle forgets."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            reduced[2][0]["__qualname__"] = obj.__qualname__
        return reduced
