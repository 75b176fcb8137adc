"""How the arrays of a blob are compressed, chunked and labelled, in Zarr's terms."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.errors import DefinitionError
from jobrunner.names import check_name

Compressor = Mapping[str, Any]
"""``name`` and ``configuration`` of the codec, as in a Zarr document."""


@dataclass(frozen=True, slots=True)
class ArrayOptions:
    """What the user chose for the arrays of a blob."""

    compressors: tuple[Compressor, ...] | None = None  # one; (): none; None: the manager's
    chunks: tuple[int, ...] | None = None  # shape of a chunk, which is stored and read as a unit
    dims: tuple[str, ...] | None = None  # names of the axes
    coords: tuple[str, ...] = ()  # blobs of the node that locate the items


DEFAULT_ARRAY_OPTIONS = ArrayOptions()

ZSTD_LEVELS = range(-(1 << 17), 23)


def read_array_options(
    compressors: object, chunks: object, dims: object, coords: object, where: str
) -> ArrayOptions | None:
    """Check these arguments of a `Blob`; None if none is given. Errors begin with `where`."""
    if all(option is None for option in (compressors, chunks, dims, coords)):
        return None
    names = _read_names(dims, "dimension", f"{where}: dims")
    if names is not None and len(set(names)) < len(names):
        raise DefinitionError(f"{where}: dims must have different names; got {names}.")
    located = _read_names(coords, "blob", f"{where}: coords") or ()
    if located and names is None:
        raise DefinitionError(
            f"{where}: coords={located} requires dims, names for the blob's axes, which the blobs "
            f"named in coords have too."
        )
    shape = _read_shape(chunks, f"{where}: chunks")
    if shape is not None and names is not None and len(shape) != len(names):
        raise DefinitionError(
            f"{where}: chunks={shape} have {len(shape)} axes, dims={names} {len(names)}."
        )
    read = None
    if compressors is not None:
        read = read_compressors(compressors, where)
    return ArrayOptions(read, shape, names, located)


def _read_names(names: object, kind: str, where: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    listed = (names,) if isinstance(names, str) else names
    if not isinstance(listed, Sequence):
        raise DefinitionError(f"{where} must be a name or a sequence of names; got {names!r}.")
    for name in listed:
        check_name(name, kind)
        if " " in name or (kind == "dimension" and name.startswith("_")):
            # Readers split lists of coordinates at spaces.
            rule = "contain no space, and those of axes do not begin with '_'"
            raise DefinitionError(f"{where} has {name!r}, but such names {rule}. Choose another.")
    return tuple(listed)


def read_compressors(compressors: object, where: str) -> tuple[Compressor, ...]:
    """Convert a name, mapping or Zarr codec to the form of a Zarr document, with all settings.

    ``()`` is none. Errors begin with `where`.
    """
    items: Sequence[Any] = [compressors]
    if isinstance(compressors, Sequence) and not isinstance(compressors, str):
        items = compressors
    if len(items) > 1:
        raise DefinitionError(f"{where}: expected one compressor or (), got {len(items)}.")
    return tuple(_read_compressor(item, where) for item in items)


def _read_compressor(item: Any, where: str) -> Compressor:
    if isinstance(item, str):
        item = {"name": item}
    elif hasattr(item, "to_dict"):
        item = item.to_dict()
    settings = None
    if isinstance(item, Mapping):
        settings = item.get("configuration", {})
    if not isinstance(settings, Mapping) or not isinstance(item.get("name"), str):
        raise DefinitionError(
            f"{where}: compressors must be a name ('zstd') or a Zarr codec "
            f"(zarr.codecs.ZstdCodec(level=3)); got {item!r}."
        )
    if item["name"] != "zstd":
        raise DefinitionError(
            f"{where}: checkpoints are compressed by 'zstd', which every reader of Zarr has, not by "
            f"{item['name']!r}. Name 'zstd', or pass zarr.codecs.ZstdCodec(level=3)."
        )
    full = {"level": 0, "checksum": False, **settings}
    level, checksum = full["level"], full["checksum"]
    is_level = type(level) is int and ZSTD_LEVELS.start <= level < ZSTD_LEVELS.stop
    if len(full) > 2 or not is_level or type(checksum) is not bool:
        raise DefinitionError(
            f"{where}: the compressor 'zstd' does not accept the settings {dict(settings)}: level "
            f"is an int of {ZSTD_LEVELS.start} to {ZSTD_LEVELS.stop - 1}, checksum a bool."
        )
    return {"name": "zstd", "configuration": full}


def _read_shape(shape: object, where: str) -> tuple[int, ...] | None:
    if shape is None:
        return None
    sizes: Sequence[Any] = shape if isinstance(shape, Sequence) else (shape,)
    try:
        read = tuple(operator.index(size) for size in sizes)
    except TypeError:
        read = ()
    if not read or any(size < 1 for size in read) or any(isinstance(s, bool) for s in sizes):
        raise DefinitionError(f"{where} must be an int >= 1 for each axis; got {shape!r}.")
    return read
