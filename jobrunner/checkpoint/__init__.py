"""Managers, which save and load epochs; policies: when to save, which epochs to keep."""

from jobrunner.checkpoint.commits import read_receipts
from jobrunner.checkpoint.encoding import (
    REGISTERED_CODECS,
    Codec,
    CodecTable,
    Decoder,
    EncodedBlob,
    Unmade,
    encode_blobs,
    library_parts,
    register_codec,
)
from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.history import read_metadata
from jobrunner.checkpoint.keep_policies import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
    SavedEpoch,
    best_policies,
    find_unreported,
)
from jobrunner.checkpoint.loader import PARTITIONS, REPLICATED, Loader, Origins
from jobrunner.checkpoint.log import (
    STATE_INTERVAL,
    Beat,
    BeginEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    Entry,
    FileMetadataHandler,
    LogEntry,
    MetadataHandler,
    PinEntry,
    Process,
    Record,
    RewindEntry,
    RunEntry,
    SpanRecord,
    State,
    StateCache,
    Status,
    Store,
    Timing,
    UnpinEntry,
    check_details,
    check_info,
    check_plan,
    entry_to_json,
    given_up_by,
    is_known_dead,
    loose_json,
    make_entry,
    may_live,
    parse_entry,
    read_beat,
    read_state,
)
from jobrunner.checkpoint.maintenance import (
    Repair,
    StoreCopy,
    copy_epoch,
    inspect_directory,
    plan_repair,
    repair_log,
    restore_epoch,
)
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.node_manager import CheckpointManager
from jobrunner.checkpoint.retention import name_reported
from jobrunner.checkpoint.save_policies import (
    Moment,
    Pace,
    SaveBefore,
    SaveEvery,
    SavePolicy,
    epochs_until,
)
from jobrunner.checkpoint.storage import (
    Files,
    ObjectFiles,
    PosixFiles,
    absolute_path,
    files_beside,
    is_url,
    run_all,
)
from jobrunner.checkpoint.store import (
    DAMAGE_ADVICE,
    ROOT_DOCUMENT,
    ArrayOutline,
    Checkpoint,
    NodeCheckpoint,
    Receipt,
    StoreReader,
    digest_blob,
)
from jobrunner.checkpoint.worker_load import load_waiting_states
from jobrunner.checkpoint.worker_save import Save
