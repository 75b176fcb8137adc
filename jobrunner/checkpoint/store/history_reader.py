"""Histories: arrays to which runs append, of which an epoch counts the first rows.

A store's document has a `HistoryMark` for each: how many rows count, and their digests. Chunks never
change once they are full. The last one is as long as the others, but only its counted rows matter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import xxhash

from jobrunner.checkpoint.storage import DOCUMENT_BYTES, Files, join_path
from jobrunner.checkpoint.store.array_document import Digest, Length, Size
from jobrunner.checkpoint.store.damage import VerifiedFiles, changed_file, reading
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import HISTORIES, ROOT_DOCUMENT, escape

_MOST_CHUNK_BYTES = 1 << 30


class HistoryMark(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What an epoch counts of a history."""

    dtype: Annotated[
        str, msgspec.Meta(pattern=r"^[<>|][biufcmM][0-9]{1,2}(\[[0-9]*[A-Za-z]{1,2}\])?\Z")
    ]
    shape: Annotated[list[Length], msgspec.Meta(max_length=63)]  # of a row
    chunk_rows: Length
    rows: Size
    last: Size  # the rows of the last value
    holds: Literal["array", "scalar", "bool", "int", "float", "complex"] = "array"
    extends: bool = False  # a value is rows, not one row
    dims: list[str] = []  # names of the axes of a value, if it has any
    chain: Digest | Literal[""] = ""  # of the digests of all full chunks, one after another
    tail: Digest | Literal[""] = ""  # of the counted rows of the next chunk, if any count

    def __post_init__(self) -> None:
        is_number = self.holds != "array"
        if self.last > self.rows or (is_number and (self.shape or self.extends)):
            raise ValueError("the last value has not the shape of rows")
        if not (self.extends or self.last == 1):
            raise ValueError("the last value is not one row")
        if self.dims and len(self.dims) != len(self.value_shape):
            raise ValueError("the last value has not as many axes as names of axes")
        if not 0 < self.chunk_bytes <= max(self.row_bytes, _MOST_CHUNK_BYTES):
            raise ValueError(f"a chunk has {self.chunk_bytes} bytes")

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all rows that count."""
        return self.rows * self.row_bytes

    @property
    def chunk_bytes(self) -> int:
        """The size of each chunk."""
        return self.chunk_rows * self.row_bytes

    @property
    def full_chunks(self) -> int:
        """How many chunks count whole."""
        return self.rows // self.chunk_rows

    @property
    def chunks(self) -> int:
        """How many chunks have rows that count."""
        return -(-self.rows // self.chunk_rows)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """The shape of the last value."""
        return (self.last, *self.shape) if self.extends else tuple(self.shape)


def history_root(directory: str, histories: str, blob: str, node: str) -> str:
    """The path of the array of a history; `histories` is the name of the directory that has it."""
    return join_path(directory, f"{HISTORIES}/{histories}/{escape(blob)}/{escape(node)}")


def chain_of(digests: Sequence[str]) -> str:
    """The digest of full chunks, from theirs; empty if there are none."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode()) if digests else ""


def name_chunk(number: int, shape: Sequence[int]) -> str:
    """The file name of a chunk of rows of a shape."""
    return ".".join(["c", str(number), *["0"] * len(shape)])


class _RowAttributes(msgspec.Struct):
    digests: list[Digest]


class _Document(msgspec.Struct):
    attributes: _RowAttributes


_DOCUMENTS = msgspec.json.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class HistoryReader:
    """Reads what a mark counts of the array at `root`, and verifies what it reads; picklable."""

    files: Files
    root: str
    mark: HistoryMark

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return np.dtype(self.mark.dtype)

    def check_files(self) -> None:
        """Raise CheckpointCorruptError if there are fewer chunks than the mark counts."""
        with reading(self.root):
            names = self.files.list_names(self.root)
        count = len(names) - (ROOT_DOCUMENT in names)
        if count < self.mark.chunks:
            expected = f"expected {self.mark.chunks} chunks"
            raise changed_file(self.root, f"{expected}, found {count} files")

    def read_digests(self) -> list[str]:
        """The digests of all full chunks.

        The array's document lists them. It is written seldom, so it may lack the newest ones, and
        it may be damaged: what it says counts only if it fits the mark.
        """
        mark = self.mark
        if not mark.full_chunks:
            return []
        listed: list[str] = []
        with contextlib.suppress(ValueError, RecursionError, CheckpointCorruptError):
            verified = VerifiedFiles(self.files, self.root)
            data = verified.read_document(ROOT_DOCUMENT, DOCUMENT_BYTES)
            listed = _DOCUMENTS.decode(data).attributes.digests[: mark.full_chunks]
        for digests in (listed, []):
            for number in range(len(digests), mark.full_chunks):
                digests.append(xxhash.xxh3_128_hexdigest(self._read_whole(number)))
            if chain_of(digests) == mark.chain:
                return digests
        raise changed_file(
            self.root,
            f"expected full chunks with the digest {mark.chain}, as recorded; found "
            f"{chain_of(digests)}",
        )

    def _read_whole(self, number: int) -> bytes:
        """Read a chunk of the right size."""
        name, nbytes = name_chunk(number, self.mark.shape), self.mark.chunk_bytes
        verified = VerifiedFiles(self.files, self.root)
        data = verified.read_document(name, nbytes)
        if len(data) != nbytes:
            raise changed_file(verified.path(name), f"expected {nbytes} bytes, found {len(data)}")
        return data

    def read_chunk(self, number: int, digests: Sequence[str]) -> memoryview:
        """Read the counted rows of a chunk, given the digests of full ones."""
        mark = self.mark
        data = memoryview(self._read_whole(number))
        rows = min(mark.chunk_rows, mark.rows - number * mark.chunk_rows)
        expected = mark.tail
        if number < mark.full_chunks:
            expected = digests[number]
        data = data[: rows * mark.row_bytes]
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != expected:
            start = number * mark.chunk_rows
            raise changed_file(
                join_path(self.root, name_chunk(number, self.mark.shape)),
                f"expected xxh3_128 {expected} of its rows {start} to {start + rows - 1}, found "
                f"{digest}",
            )
        return data

    def read_rows(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Read rows, and verify the chunks that have them."""
        mark = self.mark
        pieces = []
        first, end = start // mark.chunk_rows, -(-stop // mark.chunk_rows)
        if stop > start:
            digests = self.read_digests() if first < mark.full_chunks else []
            for number in range(first, end):
                pieces.append(self.read_chunk(number, digests))
        skipped = start - first * mark.chunk_rows
        data = np.frombuffer(b"".join(pieces), self.dtype).reshape(-1, *mark.shape)
        return data[skipped : skipped + stop - start]

    def read_last(self) -> Any:
        """Read the value that a task has put last."""
        mark = self.mark
        value = self.read_rows(mark.rows - mark.last, mark.rows).reshape(mark.value_shape)
        if mark.holds == "array":
            return value.copy()
        return value[()] if mark.holds == "scalar" else value.item()

    def verify(self) -> None:
        """Read and verify all rows."""
        digests = self.read_digests()
        for number in range(self.mark.chunks):
            self.read_chunk(number, digests)
