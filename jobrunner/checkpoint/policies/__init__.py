"""When a run saves, and which recorded epochs it keeps: decisions without I/O."""

from jobrunner.checkpoint.policies.retention import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    Metrics,
    RetentionPolicy,
    find_best,
    find_unreported,
    retired_by,
)
from jobrunner.checkpoint.policies.saving import (
    Auto,
    Moment,
    Pace,
    SaveBefore,
    SaveEvery,
    SavePolicy,
    epochs_until,
)
