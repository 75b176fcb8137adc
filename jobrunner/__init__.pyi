from ._version import (
    __version__ as __version__,
)
from .checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointManager as CheckpointManager,
    Codec as Codec,
    FileMetadataHandler as FileMetadataHandler,
    KeepAll as KeepAll,
    KeepBest as KeepBest,
    KeepEvery as KeepEvery,
    KeepLast as KeepLast,
    MetadataHandler as MetadataHandler,
    Moment as Moment,
    MultiNodeCheckpointManager as MultiNodeCheckpointManager,
    RetentionPolicy as RetentionPolicy,
    SaveBefore as SaveBefore,
    SavedEpoch as SavedEpoch,
    SaveEvery as SaveEvery,
    SavePolicy as SavePolicy,
    register_codec as register_codec,
)
from .cluster import (
    Session as Session,
)
from .compile import (
    Plan as Plan,
)
from .define import (
    Blob as Blob,
    Job as Job,
    Max as Max,
    Mean as Mean,
    Min as Min,
    Node as Node,
    Sum as Sum,
    Task as Task,
    TaskGroup as TaskGroup,
    TaskOutput as TaskOutput,
    WorkspaceType as WorkspaceType,
    epoch_limiter as epoch_limiter,
    job as job,
)
from .errors import (
    BlobNotFoundError as BlobNotFoundError,
    CheckpointCorruptError as CheckpointCorruptError,
    CheckpointError as CheckpointError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CheckpointWriteError as CheckpointWriteError,
    CommitConflictError as CommitConflictError,
    DefinitionError as DefinitionError,
    ExecutionError as ExecutionError,
    JobRunnerError as JobRunnerError,
    NodeLostError as NodeLostError,
    PlacementError as PlacementError,
    PlanMismatchError as PlanMismatchError,
    RunStoppedError as RunStoppedError,
    SchedulerLostError as SchedulerLostError,
    TaskFailedError as TaskFailedError,
)
from .pipes import (
    pipe as pipe,
)
from .positions import (
    EpochLike as EpochLike,
    Position as Position,
)
from .story import (
    read_story as read_story,
    write_report as write_report,
)
from .run import (
    BlobDifference as BlobDifference,
    Callback as Callback,
    CopyTo as CopyTo,
    JobRunner as JobRunner,
    ReplayReport as ReplayReport,
    ResumePlan as ResumePlan,
    RunResult as RunResult,
    SaveReport as SaveReport,
    UploadTaskGroupBuilder as UploadTaskGroupBuilder,
)
from .worker import (
    current_task as current_task,
    seeded as seeded,
)
