"""One node at one epoch, on disk."""

from jobrunner.checkpoint.store.compression import check_compressors, resolve_options
from jobrunner.checkpoint.store.layout import (
    RETIRED_DOCUMENT,
    JsonText,
    PlannedArray,
    is_sealed,
    to_json,
)
from jobrunner.checkpoint.store.manifest import ADVICE as DAMAGE_ADVICE
from jobrunner.checkpoint.store.manifest import (
    MANIFEST,
    MANIFEST_BYTES,
    ROOT_DOCUMENT,
    RecordEntry,
    read_manifest,
)
from jobrunner.checkpoint.store.position import (
    describe_position,
    is_old_form,
    name_position,
    name_step,
    steps_in,
    whole_epochs,
)
from jobrunner.checkpoint.store.reader import ArrayOutline, StoreReader
from jobrunner.checkpoint.store.stacks import LEAST_ALIKE, Alike, Rows, find_alike
from jobrunner.checkpoint.store.view import Checkpoint, NodeCheckpoint
from jobrunner.checkpoint.store.writer import (
    LINKED_BYTES,
    FormerStore,
    Receipt,
    StoreBatch,
    digest_blob,
    former_store,
)
