"""One node at one epoch, on disk."""

from __future__ import annotations

from jobrunner.checkpoint.store.chunk_writer import LINKED_BYTES, FormerStore, former_store
from jobrunner.checkpoint.store.compression import check_compressors, resolve_storage
from jobrunner.checkpoint.store.layout import (
    FORMAT,
    MANIFEST,
    RETIRED_DOCUMENT,
    ROOT_DOCUMENT,
    PlannedArray,
)
from jobrunner.checkpoint.store.reader import ArrayOutline, StoreReader
from jobrunner.checkpoint.store.stacks import Alike, Rows, find_alike
from jobrunner.checkpoint.store.verified_files import VerifiedFiles
from jobrunner.checkpoint.store.view import Checkpoint, NodeCheckpoint
from jobrunner.checkpoint.store.writer import Receipt, StoreBatch, digest_blob
from jobrunner.checkpoint.store.zarr_json import is_sealed, to_json

__all__ = [
    "FORMAT",
    "LINKED_BYTES",
    "MANIFEST",
    "RETIRED_DOCUMENT",
    "ROOT_DOCUMENT",
    "Alike",
    "ArrayOutline",
    "Checkpoint",
    "FormerStore",
    "NodeCheckpoint",
    "PlannedArray",
    "Receipt",
    "Rows",
    "StoreBatch",
    "StoreReader",
    "VerifiedFiles",
    "check_compressors",
    "digest_blob",
    "find_alike",
    "former_store",
    "is_sealed",
    "resolve_storage",
    "to_json",
]
