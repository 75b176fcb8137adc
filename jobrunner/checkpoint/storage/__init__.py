"""Bytes under names, in a file system or an object store."""

from jobrunner.checkpoint.storage.object_files import ObjectFiles
from jobrunner.checkpoint.storage.parallel import REMOVALS, THREADS, run_all, run_gently
from jobrunner.checkpoint.storage.places import (
    FILES,
    absolute_path,
    files_beside,
    files_of,
    is_url,
    outer_directories,
)
from jobrunner.checkpoint.storage.posix import BLOCK_BYTES, PosixFiles, join_path
from jobrunner.checkpoint.storage.protocol import DOCUMENT_BYTES, Files, Result
