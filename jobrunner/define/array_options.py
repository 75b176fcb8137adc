"""How the arrays of a blob are compressed, chunked, sharded and labelled, in Zarr's terms."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobrunner.errors import DefinitionError
from jobrunner.names import check_name

Compressor = Mapping[str, Any]
"""``name`` and ``configuration`` of a codec, as in a Zarr document."""


@dataclass(frozen=True, slots=True)
class ArrayOptions:
    """What the user chose for the arrays of a blob."""

    compressors: tuple[Compressor, ...] | None = None  # in order; (): none; None: the manager's
    chunks: tuple[int, ...] | None = None  # shape of a chunk, which is stored and read as a unit
    shards: tuple[int, ...] | None = None  # shape of a file; None: a file for each chunk
    dims: tuple[str, ...] | None = None  # names of the axes
    coords: tuple[str, ...] = ()  # blobs of the node that locate the items


DEFAULT_ARRAY_OPTIONS = ArrayOptions()


def read_array_options(
    compressors: object, chunks: object, shards: object, dims: object, coords: object, where: str
) -> ArrayOptions | None:
    """Check these arguments of a `Blob`; None if none is given. Errors begin with `where`."""
    if all(it is None for it in (compressors, chunks, shards, dims, coords)):
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
    if inner is not None and names is not None and len(inner) != len(names):
        raise DefinitionError(
            f"{where}: chunks={inner} have {len(inner)} axes, dims={names} {len(names)}."
        )
    read = None if compressors is None else read_compressors(compressors, where)
    return ArrayOptions(read, inner, outer, names, located)


def _read_names(names: object, kind: str, what: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    listed = (names,) if isinstance(names, str) else names
    if not isinstance(listed, Sequence):
        raise DefinitionError(f"{what} must be a name or a sequence of names; got {names!r}.")
    for name in listed:
        check_name(name, kind)
        if " " in name or (kind == "dimension" and name.startswith("_")):
            # Readers split lists of coordinates at spaces.
            rule = "contain no space, and those of axes do not begin with '_'"
            raise DefinitionError(f"{what} has {name!r}, but such names {rule}. Choose another.")
    return tuple(listed)


def read_compressors(compressors: object, where: str) -> tuple[Compressor, ...]:
    """Convert names, mappings or Zarr codecs to the form of a Zarr document."""
    is_one = isinstance(compressors, str) or not isinstance(compressors, Sequence)
    items: Sequence[Any] = [compressors] if is_one else compressors  # type: ignore[assignment]
    return tuple(_read_compressor(item, where) for item in items)


def _read_compressor(item: Any, where: str) -> Compressor:
    if isinstance(item, str):
        return {"name": item, "configuration": {}}
    # The settings that Zarr's Blosc chooses itself; only this private attribute lists them. Before
    # Zarr 3.1.3, they are None, and the codec cannot be described before they are set.
    unset = getattr(item, "_tunable_attrs", ())
    if hasattr(item, "to_dict"):
        settings = {"typesize": 1, "shuffle": "noshuffle"}
        if missing := {key: settings[key] for key in settings if getattr(item, key, "") is None}:
            unset, item = missing, replace(item, **missing)
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
