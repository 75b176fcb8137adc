"""1 define: how the arrays of a blob are stored, in the words of a Zarr document. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.errors import DefinitionError

Compressor = Mapping[str, Any]
"""``name`` and ``configuration`` of a codec, as in a Zarr document."""


@dataclass(frozen=True, slots=True)
class ArrayOptions:
    """How the arrays of a blob are stored, where that is not left to us.

    Attributes
    ----------
    compressors : tuple of mapping or None
        Applied to every array of the blob, one after another. Empty: none; None: the manager's.
    chunks : tuple of int or None
        What is stored and read as one, in items along each axis of the array.
    shards : tuple of int or None
        What goes to one file, a multiple of `chunks`; None: a file for each chunk.
    """

    compressors: tuple[Compressor, ...] | None = None
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None


DEFAULT_ARRAY_OPTIONS = ArrayOptions()


def read_array_options(
    compressors: object, chunks: object, shards: object, where: str
) -> ArrayOptions | None:
    """The arguments of a `Blob`; None where all is left to us.

    Raises
    ------
    DefinitionError
        One cannot be what it says.
    """
    if compressors is None and chunks is None and shards is None:
        return None
    inner, outer = _read_shape(chunks, f"{where}: chunks"), _read_shape(shards, f"{where}: shards")
    if outer is not None:
        if inner is None:
            raise DefinitionError(
                f"{where}: shards are files of several chunks, so give chunks too; got only "
                f"shards={outer}."
            )
        if len(inner) != len(outer) or any(o % i for i, o in zip(inner, outer, strict=True)):
            raise DefinitionError(
                f"{where}: shards are made of whole chunks, so along each axis they are a "
                f"multiple of them; got chunks={inner} and shards={outer}."
            )
    read = None if compressors is None else read_compressors(compressors, where)
    return ArrayOptions(read, inner, outer)


def read_compressors(compressors: object, where: str) -> tuple[Compressor, ...]:
    """Compressors in the words of a Zarr document, whichever way they were given.

    Parameters
    ----------
    compressors : str, mapping, codec of Zarr's, or a sequence of them
    where : str
        For messages.

    Raises
    ------
    DefinitionError
        There is something else among them.
    """
    items: Sequence[Any]
    if isinstance(compressors, str | Mapping) or hasattr(compressors, "to_dict"):
        items = [compressors]
    elif isinstance(compressors, Sequence):
        items = compressors
    else:
        raise _refused(compressors, where)
    return tuple(_read_compressor(item, where) for item in items)


def _read_compressor(item: Any, where: str) -> Compressor:
    if isinstance(item, str):
        return {"name": item, "configuration": {}}
    # Zarr's Blosc knows which of its settings nobody chose, and does not tell.
    unset = getattr(item, "_tunable_attrs", ())
    if hasattr(item, "to_dict"):
        item = item.to_dict()
    configuration = item.get("configuration", {}) if isinstance(item, Mapping) else None
    if not isinstance(configuration, Mapping) or not isinstance(item.get("name"), str):
        raise _refused(item, where)
    return {
        "name": item["name"],
        "configuration": {key: value for key, value in configuration.items() if key not in unset},
    }


def _refused(found: object, where: str) -> DefinitionError:
    return DefinitionError(
        f"{where}: compressors are names such as 'zstd', or codecs of Zarr's such as "
        f"zarr.codecs.BloscCodec(cname='lz4'), one or several; got {found!r}."
    )


def _read_shape(shape: object, what: str) -> tuple[int, ...] | None:
    if shape is None:
        return None
    sizes: Sequence[Any] = shape if isinstance(shape, Sequence) else (shape,)
    try:
        read = tuple(operator.index(size) for size in sizes)
    except TypeError:
        read = ()
    if not read or any(size < 1 for size in read) or any(isinstance(s, bool) for s in sizes):
        raise DefinitionError(
            f"{what} are numbers of items from 1 on, one for each axis; got {shape!r}."
        )
    return read
