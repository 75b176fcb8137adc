"""Which epochs exist.

`entries.py` has the kinds of entries, `details.py` what they say of runs. `state.py` applies them, one
after another: what the log says is a `State`. `handler.py` stores them as files. `log_writer.py`
appends, and notices whether another run has taken the directory; `lock.py` takes it, and judges by
`heartbeat.py` whether the run that has it is alive.
"""

from jobrunner.checkpoint.log.details import (
    PARTITIONS,
    REPLICATED,
    Details,
    Timing,
    check_info,
    loose_json,
    read_details,
    strict_json,
)
from jobrunner.checkpoint.log.entries import (
    ClaimEntry,
    CommitEntry,
    DoneEntry,
    EndEntry,
    Entry,
    Holder,
    HolderEntry,
    LaterVersionError,
    LogEntry,
    LostEntry,
    NodeContents,
    PinEntry,
    Process,
    Record,
    RetireEntry,
    RewindEntry,
    RunEntry,
    Store,
    StoreKey,
    UnpinEntry,
    entry_to_json,
    given_up_by,
    is_histories_name,
    parse_entry,
    record_in,
)
from jobrunner.checkpoint.log.handler import (
    FileMetadataHandler,
    MetadataHandler,
    parse_file_name,
)
from jobrunner.checkpoint.log.heartbeat import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    Patience,
    Status,
    is_known_dead,
    may_live,
    own_process,
    read_beat,
)
from jobrunner.checkpoint.log.lock import RunLock, refuse_if_alive
from jobrunner.checkpoint.log.log_writer import (
    STATE_INTERVAL,
    LogWriter,
    each_entry,
    make_entry,
    read_state,
)
from jobrunner.checkpoint.log.state import Claim, State
