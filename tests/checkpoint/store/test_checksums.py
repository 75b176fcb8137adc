"""Combined checksums are those of the whole."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.checkpoint.storage.posix import BLOCK_BYTES
from jobrunner.checkpoint.store.chunk_bytes import ChunkBytes, Sums, checksum_chunk, combine


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_checksums_equal_that_of_the_whole(first, second):
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def test_checksums_of_parts_longer_than_a_block_are_combined():
    first, second = b"x", bytes(range(256)) * (3 * BLOCK_BYTES >> 8)
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=5), st.binary(min_size=1))
def test_one_pass_computes_the_checksums_of_pieces_and_file(pieces, index):
    chunk_bytes = ChunkBytes([*pieces, index], 0, [len(piece) for piece in pieces])
    chunk = checksum_chunk(chunk_bytes, 0)
    assert chunk.pieces == tuple((len(piece), crc32c(piece)) for piece in pieces)
    assert chunk.crc == crc32c(b"".join([*pieces, index]))


def test_a_piece_longer_than_a_block_counts_once_it_is_whole():
    piece = bytes(BLOCK_BYTES - 8) + b"end of a block that is followed by more"
    sums = Sums(ChunkBytes([piece, b"index"], 0, [len(piece)]))
    view = memoryview(piece)
    assert sums.add(view[:BLOCK_BYTES], 0) == 0
    assert sums.pieces == []
    crc = sums.add(view[BLOCK_BYTES:], 0)
    assert crc == crc32c(piece)
    assert sums.add(memoryview(b"index"), crc) == crc32c(piece + b"index")


def test_zeros_that_follow_are_part_of_the_file():
    chunk_bytes = ChunkBytes([b"abc"], 5, None)
    assert checksum_chunk(chunk_bytes, 0).crc == crc32c(b"abc" + bytes(5))
