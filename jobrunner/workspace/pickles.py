"""Pickles of values for other nodes and workers. No Dask."""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from jobrunner.compile import gc_paused
from jobrunner.workspace.contents import items_of, survey
from jobrunner.workspace.copies import small_parts
from jobrunner.workspace.kinds import IMMUTABLE

_PAUSED_BYTES = 100_000
"""Shorter pickles make few objects."""

_NUMPY = re.compile(b"numpy")


class NotPicklableError(TypeError):
    """A value that cannot leave its node, since it cannot be pickled."""


@dataclass(eq=False, slots=True)
class Snapshot:
    """A frozen value of which every reader gets a copy."""

    data: Any
    restore: Callable[[Any], Any]

    def open(self) -> Any:
        """Return a copy of the value."""
        return self.restore(self.data)


def to_frames(value: Any) -> list[Any]:
    """Pickle a value for `from_frames`, with large buffers apart.

    The buffers are not copied: the value must not change until they are sent.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(value, buffers)
    return [head, *(buffer.raw() for buffer in buffers)]


def crossing_frames(value: Any) -> list[Any]:
    """Return `to_frames` of a value, sooner for numbers, arrays and short containers of these."""
    if type(value) in IMMUTABLE:
        return [pickle.dumps(value, protocol=5)]
    if not _is_plain(value):
        return to_frames(value)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def _is_plain(value: Any) -> bool:
    """Whether Python's own pickler keeps all there is of a value, and soon."""
    if type(value) is np.ndarray:
        return value.dtype.isnative and not value.dtype.hasobject
    parts: list[Any] = []
    return small_parts(value, parts) and all(
        part.dtype.isnative for part in parts if type(part) is np.ndarray
    )


def from_frames(frames: Sequence[Any]) -> Any:
    """Unpickle a value; its arrays use the memory of `frames`."""
    if len(frames[0]) <= _PAUSED_BYTES:
        return pickle.loads(frames[0], buffers=frames[1:])
    with gc_paused():
        return pickle.loads(frames[0], buffers=frames[1:])


def open_frames(frames: Sequence[Any]) -> Any:
    """Unpickle a received value for one of its readers; all use the same memory."""
    value = from_frames(frames)
    kind = type(value)
    if kind is Snapshot:
        return value.open()
    if kind in IMMUTABLE or not _NUMPY.search(frames[0]):  # there is no array in it
        return value
    parts: list[Any] = []
    is_plain = kind is np.ndarray and not value.dtype.hasobject
    if not (is_plain or small_parts(value, parts)):
        parts = survey(value).memory() if items_of(kind) else []
    for part in (value, *parts):
        if isinstance(part, np.ndarray):
            part.flags.writeable = False
    return value


def snapshot(value: Any) -> Snapshot:
    """Pickle a value for each of its readers; raises `NotPicklableError`."""
    try:
        return Snapshot([dumps(value)], open_frames)
    except Exception as error:
        raise NotPicklableError(
            f"A value of type {type(value).__qualname__} cannot be pickled, so it cannot be "
            f"copied for another node or a TaskOutput ({type(error).__name__}: {error}). Store "
            f"it in a blob, and read that by name in tasks of its own node."
        ) from None


def dumps(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickle a value; with `buffers`, its large buffers go there."""
    take = None if buffers is None else buffers.append
    try:
        return _dumped(_Pickler, value, take)
    except Exception:  # definitions of a script or a notebook are pickled by value
        if buffers is not None:
            buffers.clear()
        return _dumped(_CloudPickler, value, take)


def dumps_definitions(value: Any) -> bytes:
    """Pickle functions and what they refer to; those of a script or a notebook by value."""
    return _dumped(_CloudPickler, value, None)


def _dumped(pickler: Any, value: Any, take: Any) -> bytes:
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "Tensor"):  # it is imported, not only being imported
        _ARRAYS.setdefault(torch.Tensor, _reduce_tensor)
    file = io.BytesIO()
    pickler(file, protocol=5, buffer_callback=take).dump(value)
    return file.getvalue()


def _reduce_array(array: np.ndarray) -> Any:
    """Keep the byte order, which NumPy's own pickles lose for arrays that are not contiguous."""
    dtype = array.dtype
    if dtype.isnative or dtype.names is not None:
        return array.__reduce_ex__(5)
    # By its name: the pickle of a dtype of dates loses the byte order too.
    return _as_dtype, (array.view(dtype.newbyteorder("=")), dtype.str, dict(dtype.metadata or {}))


def _as_dtype(array: np.ndarray, name: str, metadata: dict[str, Any]) -> np.ndarray:
    return array.view(np.dtype(name, metadata=metadata) if metadata else name)


def _reduce_masked(array: Any) -> Any:
    """Keep the absence of a mask, and a fill value that was not set."""
    if array._baseclass is not np.ndarray or array._optinfo:
        return array.__reduce__()
    mask = None if array.mask is np.ma.nomask else array.mask
    return _mask, (array.data, mask, array._fill_value, bool(array.hardmask))


def _mask(data: np.ndarray, mask: Any, fill: Any, is_hard: bool) -> Any:
    made: Any = np.ma.MaskedArray(data, np.ma.nomask if mask is None else mask, hard_mask=is_hard)
    if fill is not None:
        made.set_fill_value(fill[()])
    return made


def _reduce_tensor(tensor: Any) -> Any:
    """Keep tensors of uint16, float8 and the like: what PyTorch makes of them cannot be loaded."""
    made, arguments, *others = tensor.__reduce_ex__(5)
    torch = sys.modules["torch"]
    if isinstance(arguments[0], torch.UntypedStorage):
        storage, *rest = arguments
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
        arguments = (typed, *rest)
    return made, arguments, *others


def _refuse(view: memoryview) -> Any:
    raise TypeError("a memoryview would arrive as bytes: pass bytes(...) or np.asarray(...)")


_ARRAYS: Any = {
    np.ndarray: _reduce_array,
    np.ma.MaskedArray: _reduce_masked,
    memoryview: _refuse,
}
_TABLE: Any = ChainMap(_ARRAYS, copyreg.dispatch_table)


class _Pickler(pickle.Pickler):
    dispatch_table = _TABLE


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    dispatch_table: ClassVar[Any] = ChainMap(_ARRAYS, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """Keep the place of a class that is inside another one, which cloudpickle forgets."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            reduced[2][0]["__qualname__"] = obj.__qualname__
        return reduced
