"""Run a job: init or resume, then epochs, then upload, download and exit."""

from jobrunner.run.callbacks import Callback
from jobrunner.run.diff import compare_checkpoints, compare_runs
from jobrunner.run.matching import Missing
from jobrunner.run.replay import BlobDifference, Replay, ReplayReport
from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.run.resume import ResumeFrom
from jobrunner.run.runner import JobRunner
from jobrunner.run.saver import SaveErrorPolicy
from jobrunner.run.upload import CopyTo, UploadTaskGroupBuilder
