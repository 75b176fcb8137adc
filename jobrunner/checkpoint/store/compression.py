"""Compressors: Zarr's own, named as in its documents, off unless somebody asks for them."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jobrunner.define import ArrayOptions, Compressor
from jobrunner.errors import DefinitionError

_NAMES = ("blosc", "gzip", "zstd")
"""Those that the specification of Zarr has, for every reader to know them."""


def check_compressors(compressors: Sequence[Compressor], where: str) -> tuple[Compressor, ...]:
    """Find out whether Zarr knows the compressors; gives them with all their settings.

    Parameters
    ----------
    compressors : sequence of mapping
        ``name`` and ``configuration``, as in a Zarr document.
    where : str
        For messages.

    Raises
    ------
    DefinitionError
        One is unknown here, takes other settings, or is no compressor.
    """
    if not compressors:
        return ()
    from zarr.registry import get_codec_class  # only who compresses pays for the import

    full = []
    for about in compressors:
        asked = dict(about.get("configuration", {}))
        if about["name"] not in _NAMES:
            raise DefinitionError(
                f"{where}: {about['name']!r} is none of the compressors that every reader of Zarr "
                f"has: {', '.join(map(repr, _NAMES))}. Name one of these, or pass a codec such as "
                f"zarr.codecs.ZstdCodec(level=3)."
            )
        try:
            codec = get_codec_class(about["name"]).from_dict({**about, "configuration": asked})
            known: dict[str, Any] = dict(codec.to_dict())
        except Exception as error:
            raise DefinitionError(
                f"{where}: the compressor {about['name']!r} has no such settings as {asked}: "
                f"{type(error).__name__}: {error}. See zarr.codecs for those it has."
            ) from error
        configuration = {**known.get("configuration", {}), **asked}
        if about["name"] == "blosc":
            # Which suit the dtype of each array, where nobody chose.
            configuration = {
                key: value
                for key, value in configuration.items()
                if key not in ("typesize", "shuffle") or key in asked
            }
        full.append({"name": about["name"], "configuration": configuration})
    return tuple(full)


def resolve_storage(
    storage: Mapping[str, Mapping[str, ArrayOptions]],
) -> dict[str, dict[str, ArrayOptions]]:
    """Node -> blob -> its storage, the compressors with all their settings.

    Raises
    ------
    DefinitionError
        Zarr does not know a compressor.
    """
    return {
        node: {
            name: asked
            if asked.compressors is None
            else replace(
                asked,
                compressors=check_compressors(asked.compressors, f"Blob {name!r} of node {node!r}"),
            )
            for name, asked in blobs.items()
        }
        for node, blobs in storage.items()
    }


def suit_dtype(compressors: Sequence[Compressor], itemsize: int) -> list[dict[str, Any]]:
    """The compressors with the settings that go by the size of an item."""
    suited = []
    for about in compressors:
        configuration = dict(about["configuration"])
        if about["name"] == "blosc":
            configuration.setdefault("typesize", min(itemsize, 255))
            shuffle = "bitshuffle" if configuration["typesize"] == 1 else "shuffle"
            configuration.setdefault("shuffle", shuffle)
        suited.append({"name": about["name"], "configuration": configuration})
    return suited


def compress(data: bytes | memoryview, compressors: Sequence[Compressor]) -> bytes:
    """What the compressors, one after another, make of `data`."""
    for about in compressors:
        if about["name"] == "gzip":
            # The codec writes the time into it, and what is unchanged would not be the same.
            data = gzip.compress(data, about["configuration"]["level"], mtime=0)
        else:
            data = bytes(_codec(about).encode(data))
    return bytes(data)


def decompress(data: bytes, compressors: Sequence[Compressor]) -> bytes:
    """What `compress` was given.

    Raises
    ------
    ValueError
        The compressors are others than `check_compressors` lets pass, or did not make `data`.
    """
    for about in reversed(compressors):
        # numcodecs has others, and one of them unpickles.
        if about["name"] not in _NAMES:
            raise ValueError(f"{about['name']!r} is none of the compressors {', '.join(_NAMES)}")
        try:
            data = bytes(_codec(about).decode(data))
        except Exception as error:
            raise ValueError(f"{about['name']} cannot decompress it: {error}") from error
    return data


def _codec(about: Compressor) -> Any:
    return _make(about["name"], tuple(sorted(about["configuration"].items())))


@lru_cache(maxsize=64)
def _make(name: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """The codec of numcodecs, which Zarr's own of that name wraps."""
    import numcodecs

    configuration = dict(settings)
    if name == "blosc":
        shuffles = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
        configuration["shuffle"] = shuffles[configuration["shuffle"]]
        # Threads of its own would share one state among all of ours.
        numcodecs.blosc.use_threads = False
    return numcodecs.get_codec({"id": name, **configuration})
