"""5 save: from blobs to recorded epochs and back.

The way of the data, one module a stage; a module imports only from those above it::

    linux             what Linux can do besides
    paths, files      where; what is asked of a file system, one method an operation
    objects           ... and of an object store
    dtypes, codecs, tensors, states, compression
    encoding          values -> JSON trees and arrays       (pure)
    aliasing, blobs   ... all blobs of a node together      (pure)
    decoding          ... and back                          (pure)
    grid, content     arrays -> files, and their pieces, as bytes   (pure)
    stacks            short arrays of which many are alike, as one   (pure)
    digests           ... told from others, in one pass     (pure)
    documents         Zarr documents, as bytes                      (pure)
    layout            trees and arrays -> documents and chunks, and what they are called   (pure)
    chunks            an array's files, written or shared with the store before
    store             write stores, and make them durable
    threads           several files at once
    verified, arrays  read their files and arrays, and verify them
    reader            ... as values, or look into them lazily
    epochmap, records log entries -> what is recorded       (pure)
    entries           ... as files                                  (pure)
    log               the metadata handler, which keeps them
    journal           a run's hold on the log
    policies, schedule   which epochs are kept, and when to save   (pure)
    liveness, probe, hold   a run's hold on the directory
    chores            hides and deletes in the background
    provenance        which arrays are the very ones that the last store was written from
    snapshot          copies, so that epochs go on while they are written
    save, load        what is sent to the workers
    parts             arrays whose parts are several nodes' blobs
    view              a checkpoint to look into
    recorded          what the log says: epochs, records, pins
    directory         what their stores hold; all that reads
    held              a run takes it, and gives epochs up
    manager, single   all that writes
    transfer          an epoch saved again from another's files
    evidence, repair  what can be proven of a log that has lost entries, and said again
    inspection        what everything in a directory is

`docs/design/checkpoints.md` and `docs/design/log.md` say what lies on disk and why it is safe.
"""

from __future__ import annotations

from jobrunner.checkpoint.codecs import Codec, register_codec
from jobrunner.checkpoint.directory import PARTITIONS, CheckpointDirectory
from jobrunner.checkpoint.evidence import Repair, plan_repair
from jobrunner.checkpoint.inspection import Finding, inspect_directory
from jobrunner.checkpoint.load import load_waiting_states
from jobrunner.checkpoint.log import FileMetadataHandler, MetadataHandler, read_state
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.policies import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
)
from jobrunner.checkpoint.reader import ArrayOutline
from jobrunner.checkpoint.repair import repair_log
from jobrunner.checkpoint.save import CopiesOrder, SaveOrder
from jobrunner.checkpoint.schedule import Auto, Moment, SaveEvery, SavePolicy, epochs_until
from jobrunner.checkpoint.single import CheckpointManager
from jobrunner.checkpoint.store import Receipt
from jobrunner.checkpoint.transfer import copy_epoch, find_set_aside, restore_epoch
from jobrunner.checkpoint.view import Checkpoint, NodeCheckpoint

__all__ = [
    "PARTITIONS",
    "ArrayOutline",
    "Auto",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointManager",
    "Codec",
    "CopiesOrder",
    "FileMetadataHandler",
    "Finding",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "MetadataHandler",
    "Moment",
    "MultiNodeCheckpointManager",
    "NodeCheckpoint",
    "Receipt",
    "Repair",
    "RetentionPolicy",
    "SaveEvery",
    "SaveOrder",
    "SavePolicy",
    "copy_epoch",
    "epochs_until",
    "find_set_aside",
    "inspect_directory",
    "load_waiting_states",
    "plan_repair",
    "read_state",
    "register_codec",
    "repair_log",
    "restore_epoch",
]
