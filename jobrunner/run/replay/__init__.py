"""Run a recorded epoch again and compare the result; compare checkpoints."""

from jobrunner.run.replay.compare import compare_checkpoints
from jobrunner.run.replay.replay import BlobDifference, Replay, ReplayReport
from jobrunner.run.replay.runs import compare_runs
