"""How the arrays of a blob are compressed, chunked and sharded, in Zarr's terms."""

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
    """What the user chose for the arrays of a blob."""

    compressors: tuple[Compressor, ...] | None = None  # in order; (): none; None: the manager's
    chunks: tuple[int, ...] | None = None  # shape of a chunk, which is stored and read as a unit
    shards: tuple[int, ...] | None = None  # shape of a file; None: a file for each chunk


DEFAULT_ARRAY_OPTIONS = ArrayOptions()


def read_array_options(
    compressors: object, chunks: object, shards: object, where: str
) -> ArrayOptions | None:
    """Check these arguments of a `Blob`; None if none is given. Errors begin with `where`."""
    if compressors is None and chunks is None and shards is None:
        return None
    inner, outer = _read_shape(chunks, f"{where}: chunks"), _read_shape(shards, f"{where}: shards")
    if outer is not None:
        if inner is None:
            raise DefinitionError(
                f"{where}: shards={outer} requires chunks: a shard is a file of several chunks."
            )
        if len(inner) != len(outer) or any(o % i for i, o in zip(inner, outer, strict=True)):
            raise DefinitionError(
                f"{where}: shards must be a multiple of chunks along each axis; got "
                f"chunks={inner} and shards={outer}."
            )
    read = None if compressors is None else read_compressors(compressors, where)
    return ArrayOptions(read, inner, outer)


def read_compressors(compressors: object, where: str) -> tuple[Compressor, ...]:
    """Convert names, mappings or Zarr codecs to the form of a Zarr document."""
    is_one = isinstance(compressors, str) or not isinstance(compressors, Sequence)
    items: Sequence[Any] = [compressors] if is_one else compressors  # type: ignore[assignment]
    return tuple(_read_compressor(item, where) for item in items)


def _read_compressor(item: Any, where: str) -> Compressor:
    if isinstance(item, str):
        return {"name": item, "configuration": {}}
    # The settings that Zarr's Blosc chooses itself; only this private attribute lists them.
    unset = getattr(item, "_tunable_attrs", ())
    if hasattr(item, "to_dict"):
        item = item.to_dict()
    configuration = item.get("configuration", {}) if isinstance(item, Mapping) else None
    if not isinstance(configuration, Mapping) or not isinstance(item.get("name"), str):
        raise DefinitionError(
            f"{where}: compressors must be names ('zstd') or Zarr codecs "
            f"(zarr.codecs.BloscCodec(cname='lz4')), one or several; got {item!r}."
        )
    return {
        "name": item["name"],
        "configuration": {key: value for key, value in configuration.items() if key not in unset},
    }


def _read_shape(shape: object, what: str) -> tuple[int, ...] | None:
    if shape is None:
        return None
    sizes: Sequence[Any] = shape if isinstance(shape, Sequence) else (shape,)
    try:
        read = tuple(operator.index(size) for size in sizes)
    except TypeError:
        read = ()
    if not read or any(size < 1 for size in read) or any(isinstance(s, bool) for s in sizes):
        raise DefinitionError(f"{what} must be an int >= 1 for each axis; got {shape!r}.")
    return read
