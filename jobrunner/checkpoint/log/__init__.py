"""Which epochs exist."""

from jobrunner.checkpoint.log.details import check_details, check_info, check_plan
from jobrunner.checkpoint.log.entries import (
    BeginEntry,
    Claim,
    CommitEntry,
    DoneEntry,
    EndEntry,
    Entry,
    GapEntry,
    Holder,
    LogEntry,
    Process,
    RebuiltRecord,
    RepairEntry,
    RetireEntry,
    RewindEntry,
    RunEntry,
    StateEntry,
    StoreRecord,
    commit_in,
    commits_in,
    given_up_by,
    holder_of,
)
from jobrunner.checkpoint.log.handler import (
    ENTRY_NAME,
    TEMPORARY_NAME,
    FileMetadataHandler,
    each_entry,
    read_content,
    read_state,
)
from jobrunner.checkpoint.log.heartbeat import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    Beat,
    Patience,
    Status,
    is_known_dead,
    is_left_behind,
    may_live,
    own_process,
    read_beat,
    read_process,
)
from jobrunner.checkpoint.log.protocol import MetadataHandler
from jobrunner.checkpoint.log.run_lock import RunLock, refuse_if_alive
from jobrunner.checkpoint.log.state import (
    RESTARTS,
    STATE_INTERVAL,
    LaterVersionError,
    State,
    entry_to_json,
    make_entry,
    parse_entry,
    store_names,
)
from jobrunner.checkpoint.log.timing import SpanRecord, Timing
from jobrunner.checkpoint.log.writer import LogWriter, loose_json, strict_json
