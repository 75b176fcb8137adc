"""Run a recorded epoch again and compare the result; compare checkpoints."""

from __future__ import annotations

from jobrunner.run.replay.compare import compare_checkpoints
from jobrunner.run.replay.replay import BlobDifference, Replay, ReplayReport

__all__ = ["BlobDifference", "Replay", "ReplayReport", "compare_checkpoints"]
