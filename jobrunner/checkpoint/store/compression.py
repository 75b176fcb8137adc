"""Compress and decompress by Zarr's own compressors, named as in its documents."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from msgspec import Meta

from jobrunner.checkpoint.encoding import Document
from jobrunner.define import ArrayOptions, Compressor
from jobrunner.errors import DefinitionError

_NAMES = ("blosc", "gzip", "zstd")
"""Those in the specification of Zarr, which every reader has."""

_OF_DTYPE: dict[str, Any] = {"typesize": 1, "shuffle": "noshuffle"}
"""Settings of blosc that `suit_dtype` replaces, unless they are asked for."""

MOST_RATIO = 1 << 16
"""How many times shorter a compressor can make data; zstd's blocks of 128 KiB take 4 bytes at least."""

_MOST_BLOSC_BYTES = (1 << 31) - 1
_BLOSC_HEADER = struct.Struct("<4xIII")
"""Versions, flags and size of an item; then bytes of the content, of a block, and of all this."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_LEAST_BYTES = 6


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
            data = bytes(
                _make(about["name"], tuple(sorted(about["configuration"].items()))).encode(data)
            )
    return bytes(data)


@lru_cache(maxsize=64)
def _make(name: str, settings: tuple[tuple[str, Any], ...] = ()) -> Any:
    """Make the codec of numcodecs that Zarr's codec of the same name wraps."""
    import numcodecs

    configuration = dict(settings)
    if name == "zstd":
        return numcodecs.Zstd(**configuration)
    if "shuffle" in configuration:
        shuffles = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
        configuration["shuffle"] = shuffles[configuration["shuffle"]]
    # Its own threads share one state, which several of ours would use at once.
    numcodecs.blosc.use_threads = False
    return numcodecs.Blosc(**configuration)


# --- and back


class GzipSettings(Document):
    """Settings of gzip."""

    level: Annotated[int, Meta(ge=-1, le=9)]


class ZstdSettings(Document):
    """Settings of zstd."""

    level: Annotated[int, Meta(ge=-(1 << 17), le=22)]
    checksum: bool


class BloscSettings(Document):
    """Settings of blosc."""

    cname: Literal["lz4", "lz4hc", "blosclz", "zstd", "snappy", "zlib"]
    clevel: Annotated[int, Meta(ge=0, le=9)]
    blocksize: Annotated[int, Meta(ge=0, le=_MOST_BLOSC_BYTES)]
    typesize: Annotated[int, Meta(ge=1, le=_MOST_BLOSC_BYTES)]
    shuffle: Literal["noshuffle", "shuffle", "bitshuffle"]


class Gzip(Document, tag_field="name", tag="gzip"):
    """A compressor, as in a Zarr document."""

    configuration: GzipSettings


class Zstd(Document, tag_field="name", tag="zstd"):
    """A compressor, as in a Zarr document."""

    configuration: ZstdSettings


class Blosc(Document, tag_field="name", tag="blosc"):
    """A compressor, as in a Zarr document."""

    configuration: BloscSettings


def decompress(data: bytes, compressors: Sequence[CompressorEntry], most: int) -> bytes:
    """Undo `compress`, which got at most `most` bytes; allocates nothing longer.

    Raises ValueError if the compressors did not produce the data, or from more.
    """
    for i, entry in reversed(list(enumerate(compressors))):
        # What a compressor cannot make shorter, it makes a little longer.
        limit = most + (most // 64 + 4096 if i else 0)
        try:
            data = _DECODERS[type(entry)](data, limit)
        except Exception as error:
            raise ValueError(
                f"{entry.__struct_config__.tag} cannot decompress it: {error}"
            ) from error
    return data


def _from_gzip(data: bytes, most: int) -> bytes:
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    found = stream.decompress(data, most + 1)
    _check_size(len(found), most)
    if not stream.eof or stream.unused_data:
        raise ValueError("it is not one whole gzip file")
    return found


def _from_zstd(data: bytes, most: int) -> bytes:
    """Decompress one frame whose header says how long its content is, as all of numcodecs do."""
    about = data[4] if len(data) > _ZSTD_LEAST_BYTES else 0
    is_single, has_dictionary, size_code = about & 32, about & 3, about >> 6
    start = 5 if is_single else 6
    width = 1 << size_code
    if data[:4] != _ZSTD_MAGIC or has_dictionary or not (size_code or is_single):
        raise ValueError("it does not begin as numcodecs writes it")
    size = int.from_bytes(data[start : start + width], "little") + (256 if size_code == 1 else 0)
    _check_size(size, most)
    found: bytes = _make("zstd").decode(data)
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes, and its header says {size}")
    return found


def _from_blosc(data: bytes, most: int) -> bytes:
    if len(data) < _BLOSC_HEADER.size:
        raise ValueError("it has no header")
    size, block, stored = _BLOSC_HEADER.unpack_from(data)
    _check_size(size, most)
    # C-Blosc relies on these.
    if stored != len(data) or block > max(size, 1) or bool(block) != bool(size):
        raise ValueError("its header does not fit it")
    found: bytes = _make("blosc").decode(data)
    return found


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"it holds more than the {most} bytes that belong there")


CompressorEntry = Gzip | Zstd | Blosc
_DECODERS: dict[type, Callable[[bytes, int], bytes]] = {
    Gzip: _from_gzip,
    Zstd: _from_zstd,
    Blosc: _from_blosc,
}
