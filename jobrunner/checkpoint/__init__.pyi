from .directory_run import (
    read_receipts as read_receipts,
)
from .encoding import (
    REGISTERED_CODECS as REGISTERED_CODECS,
    Codec as Codec,
    CodecTable as CodecTable,
    Decoder as Decoder,
    EncodedBlob as EncodedBlob,
    Tree as Tree,
    Unmade as Unmade,
    encode_blobs as encode_blobs,
    register_codec as register_codec,
    show_outline as show_outline,
    whole_tree as whole_tree,
)
from .directory import (
    Directory as Directory,
    EpochRecord as EpochRecord,
)
from .history_writer import (
    make_groups as make_groups,
)
from .keep_policies import (
    KeepAll as KeepAll,
    KeepAny as KeepAny,
    KeepBest as KeepBest,
    KeepEvery as KeepEvery,
    KeepLast as KeepLast,
    RetentionPolicy as RetentionPolicy,
    SavedEpoch as SavedEpoch,
    best_metrics as best_metrics,
    find_unreported as find_unreported,
    name_reported as name_reported,
    rank as rank,
)
from .load_plan import (
    blobs_of as blobs_of,
    plan_load as plan_load,
    stateful_blobs as stateful_blobs,
    with_contents as with_contents,
)
from .log import (
    STATE_INTERVAL as STATE_INTERVAL,
    ClaimEntry as ClaimEntry,
    CommitEntry as CommitEntry,
    Details as Details,
    DoneEntry as DoneEntry,
    EndEntry as EndEntry,
    Entry as Entry,
    FileMetadataHandler as FileMetadataHandler,
    LogEntry as LogEntry,
    MetadataHandler as MetadataHandler,
    PinEntry as PinEntry,
    Process as Process,
    Record as Record,
    RewindEntry as RewindEntry,
    RunEntry as RunEntry,
    State as State,
    Status as Status,
    Store as Store,
    Timing as Timing,
    UnpinEntry as UnpinEntry,
    check_info as check_info,
    entry_to_json as entry_to_json,
    given_up_by as given_up_by,
    is_known_dead as is_known_dead,
    loose_json as loose_json,
    read_details as read_details,
    make_entry as make_entry,
    may_live as may_live,
    parse_entry as parse_entry,
    read_beat as read_beat,
    read_state as read_state,
)
from .maintenance import (
    Repair as Repair,
    copy_files as copy_files,
    copy_root as copy_root,
    copy_epoch as copy_epoch,
    find_copied as find_copied,
    inspect_directory as inspect_directory,
    plan_repair as plan_repair,
    repair_log as repair_log,
    restore_epoch as restore_epoch,
)
from .manager import (
    CheckpointManager as CheckpointManager,
    MultiNodeCheckpointManager as MultiNodeCheckpointManager,
)
from .node_capture import (
    Encoding as Encoding,
)
from .opened import (
    Checkpoint as Checkpoint,
    NodeCheckpoint as NodeCheckpoint,
    open_record as open_record,
    verify_record as verify_record,
)
from .past_epochs import (
    read_past_epochs as read_past_epochs,
)
from .save_policies import (
    Moment as Moment,
    Pace as Pace,
    SaveBefore as SaveBefore,
    SaveEvery as SaveEvery,
    SavePolicy as SavePolicy,
    epochs_until as epochs_until,
    stride_of as stride_of,
)
from .storage import (
    Files as Files,
    ObjectFiles as ObjectFiles,
    PosixFiles as PosixFiles,
    absolute_path as absolute_path,
    files_beside as files_beside,
    is_url as is_url,
    run_all as run_all,
)
from .store import (
    ArrayOutline as ArrayOutline,
    StoredValue as StoredValue,
    StoreReader as StoreReader,
    digest_blob as digest_blob,
)
from .worker_load import (
    load_group as load_group,
    load_waiting_states as load_waiting_states,
)
from .worker_save import (
    Receipt as Receipt,
    SaveQueue as SaveQueue,
    Written as Written,
    reply_to as reply_to,
)
