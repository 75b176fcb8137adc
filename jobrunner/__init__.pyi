from ._version import (
    __version__ as __version__,
)
from .checkpoint import (
    CheckpointManager as CheckpointManager,
    KeepAll as KeepAll,
    KeepBest as KeepBest,
    KeepEvery as KeepEvery,
    KeepLast as KeepLast,
    MultiNodeCheckpointManager as MultiNodeCheckpointManager,
    SaveBefore as SaveBefore,
    SaveEvery as SaveEvery,
    register_codec as register_codec,
)
from .cluster import (
    Session as Session,
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
    Position as Position,
)
from .run import (
    Callback as Callback,
    CopyTo as CopyTo,
    JobRunner as JobRunner,
)
from .worker import (
    current_task as current_task,
    seeded as seeded,
)
