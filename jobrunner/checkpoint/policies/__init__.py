"""When to save and what to keep. Pure."""

from __future__ import annotations

from jobrunner.checkpoint.policies.retention import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
    find_unreported,
    name_reported,
)
from jobrunner.checkpoint.policies.saving import Auto, Moment, SaveEvery, SavePolicy, epochs_until

__all__ = [
    "Auto",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Moment",
    "RetentionPolicy",
    "SaveEvery",
    "SavePolicy",
    "epochs_until",
    "find_unreported",
    "name_reported",
]
