"""Compress and decompress by Zarr's own compressors, named as in its documents."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jobrunner.define import ArrayOptions, Compressor
from jobrunner.errors import DefinitionError

_NAMES = ("blosc", "gzip", "zstd")
"""Those in the specification of Zarr, which every reader has."""

_OF_DTYPE: dict[str, Any] = {"typesize": 1, "shuffle": "noshuffle"}
"""Settings of blosc that `suit_dtype` replaces, unless they are asked for."""


def check_compressors(compressors: Sequence[Compressor], where: str) -> tuple[Compressor, ...]:
    """Check that Zarr knows the compressors and their settings; return them with all settings."""
    if not compressors:
        return ()
    from zarr.registry import get_codec_class  # slow to import, and seldom needed

    full = []
    for about in compressors:
        asked = dict(about.get("configuration", {}))
        if about["name"] not in _NAMES:
            raise DefinitionError(
                f"{where}: {about['name']!r} is none of the compressors that every reader of Zarr "
                f"has: {', '.join(map(repr, _NAMES))}. Name one of these, or pass a codec, for "
                f"example zarr.codecs.ZstdCodec(level=3)."
            )
        try:
            # Zarr before 3.1.3 cannot describe a codec without them.
            filled = {**_OF_DTYPE, **asked} if about["name"] == "blosc" else asked
            codec = get_codec_class(about["name"]).from_dict({**about, "configuration": filled})
            known: dict[str, Any] = dict(codec.to_dict())
        except Exception as error:
            raise DefinitionError(
                f"{where}: the compressor {about['name']!r} does not accept the settings {asked}: "
                f"{type(error).__name__}: {error}. See zarr.codecs for its settings."
            ) from error
        defaults = dict(known.get("configuration", {}))
        for of_dtype in _OF_DTYPE:
            defaults.pop(of_dtype, None)
        full.append({"name": about["name"], "configuration": {**defaults, **asked}})
    return tuple(full)


def resolve_options(
    options: Mapping[str, Mapping[str, ArrayOptions]],
) -> dict[str, dict[str, ArrayOptions]]:
    """Check the compressors of each node's blobs, and add all their settings."""
    resolved = {node: dict(blobs) for node, blobs in options.items()}
    for node, blobs in resolved.items():
        for name, asked in blobs.items():
            if asked.compressors is not None:
                full = check_compressors(asked.compressors, f"Blob {name!r} of node {node!r}")
                blobs[name] = replace(asked, compressors=full)
    return resolved


def suit_dtype(compressors: Sequence[Compressor], itemsize: int) -> list[dict[str, Any]]:
    """Add the settings that depend on the size of an item."""
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
    """Apply the compressors, one after another."""
    for about in compressors:
        if about["name"] == "gzip":
            # Zarr's codec writes the time, so that equal data would differ.
            data = gzip.compress(data, about["configuration"]["level"], mtime=0)
        else:
            data = bytes(_codec(about).encode(data))
    return bytes(data)


def decompress(data: bytes, compressors: Sequence[Compressor]) -> bytes:
    """Undo `compress`; raises ValueError if the compressors did not produce the data."""
    for about in reversed(compressors):
        # numcodecs has others too, one of which unpickles.
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
    """Make the codec of numcodecs that Zarr's codec of the same name wraps."""
    import numcodecs

    configuration = dict(settings)
    if name == "blosc":
        shuffles = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
        configuration["shuffle"] = shuffles[configuration["shuffle"]]
        # Its own threads share one state, which several of ours would use at once.
        numcodecs.blosc.use_threads = False
    return numcodecs.get_codec({"id": name, **configuration})
