"""Say what runs did, from the records of their directory alone."""

from jobrunner.report.ledger import Ledger
from jobrunner.report.page import to_page, write_report
from jobrunner.report.reader import read_story
from jobrunner.report.runs import (
    DEPTH,
    LiveRun,
    LiveRuns,
    RunSummary,
    best_of,
    find_runs,
    open_run,
    summarize_run,
)
from jobrunner.report.story import (
    EpochStory,
    LossStory,
    RunStory,
    SaveStory,
    Span,
    Story,
)
from jobrunner.report.trace import to_trace, write_trace
