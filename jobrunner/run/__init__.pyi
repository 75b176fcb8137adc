from .callbacks import Callback as Callback
from .diff import compare_checkpoints as compare_checkpoints, compare_runs as compare_runs
from .matching import Missing as Missing
from .replay import BlobDifference as BlobDifference, Replay as Replay, ReplayReport as ReplayReport
from .result import ResumePlan as ResumePlan, RunResult as RunResult, SaveReport as SaveReport
from .resume import ResumeFrom as ResumeFrom
from .runner import JobRunner as JobRunner
from .saver import SaveErrorPolicy as SaveErrorPolicy
from .upload import CopyTo as CopyTo, UploadTaskGroupBuilder as UploadTaskGroupBuilder
