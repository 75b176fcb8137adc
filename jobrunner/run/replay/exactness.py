"""Whether two values are the same to the bit, in all that a save would keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jobrunner.checkpoint import Codec, Decoder, EncodedBlob, encode_blobs, to_json, without_padding
from jobrunner.run.replay.compare import compare_values


def compare_bits(
    node: str, blob: str, recorded: Any, replayed: Any, codecs: Sequence[Codec] = ()
) -> Iterator[dict[str, Any]]:
    """How a value differs from one that was loaded, in anything that a save would keep.

    Parameters
    ----------
    node, blob : str
        For messages.
    recorded : object
        As it was loaded.
    replayed : object
        As a task made it.
    codecs : sequence of Codec

    Yields
    ------
    dict
        As `compare_values`.
    """
    loaded = encode(node, blob, recorded, codecs)
    made = encode(node, blob, replayed, codecs)
    if _is_same(loaded, made):
        return
    # By way of a checkpoint once more: what was loaded has come that way already.
    one, other = (_decode(encoded, codecs) for encoded in (loaded, made))
    if _is_same(encode(node, blob, one, codecs), encode(node, blob, other, codecs)):
        return
    differences = list(compare_values(one, other))
    yield from differences or [{"where": "", "what": "content"}]


def _decode(blob: EncodedBlob, codecs: Sequence[Codec]) -> Any:
    """The value again; the states of objects that are saved by their state."""

    def array(part: int) -> np.ndarray[Any, Any]:
        data, order = blob.parts[part].data, blob.parts[part].order
        return data if order is None else data.transpose(np.argsort(order))

    # What was pickled just now is no stranger's.
    return Decoder(array, codecs, allow_pickle=True).decode(blob.tree)


def encode(node: str, blob: str, value: Any, codecs: Sequence[Codec]) -> EncodedBlob:
    """A value as a save would write it, but for what pads the items of its arrays: zeros.

    Raises
    ------
    DefinitionError
        It cannot be saved.
    """
    encoded = encode_blobs(node, {blob: value}, codecs, allow_pickle=True)[blob]
    parts = [replace(part, data=without_padding(part.data)) for part in encoded.parts]
    return replace(encoded, parts=parts)


def _is_same(one: EncodedBlob, other: EncodedBlob) -> bool:
    return (
        to_json(one.tree) == to_json(other.tree)
        and len(one.parts) == len(other.parts)
        and all(
            a.order == b.order and _are_same_bits(a.data, b.data)
            for a, b in zip(one.parts, other.parts, strict=True)
        )
    )


def _are_same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if isinstance(one.dtype, np.dtypes.StringDType):
        return bool(np.array_equal(one, other))
    return bool(np.array_equal(_bytes(one), _bytes(other)))


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
