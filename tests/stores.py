"""Writes a store of one node, for tests that read it back."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobrunner.checkpoint import Decoder, encode_blobs
from jobrunner.checkpoint.store.document import STORE_FORMAT, StoreEntry
from jobrunner.checkpoint.store.layout import lay_out
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.checkpoint.store.store_writer import StoreWriter, write_stores
from jobrunner.testing import FaultyFiles


def write_store(directory: Path | str, encoded: Mapping[str, Any]) -> StoreReader:
    """Write encoded blobs as the store of node "n" at epoch 0; return its reader."""
    files = FaultyFiles(sync=False)
    entry = StoreEntry(STORE_FORMAT, "n", 0, "r", {})
    writer = StoreWriter(files, f"{directory}/n.0", lay_out(encoded, entry))
    write_stores(files, [writer])
    return StoreReader(files, str(directory), "n.0", writer.sha256)


def written_and_read(value: Any) -> Any:
    """Write a value as a blob, verify the store, and load the blob."""
    with tempfile.TemporaryDirectory() as directory:
        reader = write_store(directory, encode_blobs("n", {"x": value}))
        reader.verify()
        return reader.load()["x"]


def decode_forged(kind: str, parts: Any) -> Any:
    """Decode a value of a library's type from parts that a stranger made."""
    blob = encode_blobs("n", {"x": parts})["x"]
    decoder = Decoder(lambda i: blob.parts[i].data, where="Blob 'x'")
    return decoder.decode({"$": kind, "of": blob.tree})
