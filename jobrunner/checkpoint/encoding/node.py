"""All blobs of a node, encoded together: what one shares with another is an error. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.aliasing import Window, refuse_shared_memory
from jobrunner.checkpoint.encoding.codecs import Codec
from jobrunner.checkpoint.encoding.encode import EncodedBlob, Encoder, UnsupportedValueError
from jobrunner.define import ArrayOptions
from jobrunner.errors import DefinitionError


def encode_blobs(
    node: str,
    blobs: Mapping[str, object],
    codecs: Sequence[Codec] = (),
    *,
    allow_pickle: bool = False,
    beside: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, EncodedBlob]:
    """Encode the blobs of a node.

    Parameters
    ----------
    node : str
        For messages.
    blobs : mapping of str to object
    codecs : sequence of Codec
    allow_pickle : bool
        Pickle what there is no other way for.
    beside : mapping of str to numpy.ndarray, optional
        Other blobs of the node, arrays that need no encoding.

    Returns
    -------
    dict of str to EncodedBlob
        The parts share memory with the values: write them before anything changes those.

    Raises
    ------
    DefinitionError
        Naming the blob that cannot be encoded, or the two that share memory.
    """
    by_type = {codec.cls: codec for codec in codecs}
    encoded: dict[str, EncodedBlob] = {}
    memory: list[Window] = []
    owners: dict[int, tuple[str, object]] = {}
    for name, value in blobs.items():
        encoder = Encoder(by_type, allow_pickle)
        try:
            tree = encoder.encode(value)
        except UnsupportedValueError as error:
            raise DefinitionError(_explain(node, name, error)) from error.__cause__
        encoded[name] = EncodedBlob(tree, encoder.parts, encoder.has_state)
        memory += [Window(name, trail, array) for trail, array in encoder.memory]
        for identity, held in encoder.identities.items():
            other, _ = owners.setdefault(identity, (name, held))
            if other != name:
                raise DefinitionError(
                    f"Node {node!r}: the blobs {other!r} and {name!r} both hold the same "
                    f"{type(held).__name__} object, and would come apart after a resume. Give "
                    f"one of them a copy, or keep both in one blob (a dict or a list)."
                )
    refuse_shared_memory(node, memory, beside or {})
    return encoded


def store_as(
    node: str, name: str, blob: EncodedBlob, storage: ArrayOptions | None, default: ArrayOptions
) -> EncodedBlob:
    """The blob with how its arrays are stored.

    Raises
    ------
    DefinitionError
        It is cut into chunks, and is no array of so many axes.
    """
    if storage is None:
        return blob if default.compressors is None else replace(blob, storage=default)
    if storage.compressors is None:
        storage = replace(storage, compressors=default.compressors)
    if storage.chunks is not None and blob.parts:
        one = blob.parts[0]
        if len(blob.parts) > 1 or one.trail or one.data.ndim != len(storage.chunks):
            found = f"{len(blob.parts)} arrays"
            if len(blob.parts) == 1:
                found = f"an array of {one.data.ndim} axes{' inside of it' if one.trail else ''}"
            raise DefinitionError(
                f"Node {node!r}, blob {name!r}: chunks={storage.chunks} cut an array of "
                f"{len(storage.chunks)} axes, and the blob is made of {found}. Give a number for "
                f"each axis of a blob that is one array, or leave chunks out."
            )
    return replace(blob, storage=storage)


def _explain(node: str, blob: str, error: UnsupportedValueError) -> str:
    item = f", item {'/'.join(error.trail)}" if error.trail else ""
    name = error.cls.__qualname__
    if error.cls.__module__ != "builtins":
        name = f"{error.cls.__module__}.{name}"
    return (
        f"Node {node!r}, blob {blob!r}{item}: a {name} cannot be saved: {error.why}. Either save "
        f"it by a codec of yours, register_codec({error.cls.__name__}, encode, decode); or keep "
        f"it out of checkpoints, outputs=Blob({blob!r}, transient=True); or pickle it, "
        f"allow_pickle=True for the checkpoint manager (--allow-pickle)."
    )
