from .find import (
    DEPTH as DEPTH,
    LiveRun as LiveRun,
    LiveRuns as LiveRuns,
    RunSummary as RunSummary,
    best_of as best_of,
    find_runs as find_runs,
    open_run as open_run,
    summarize_run as summarize_run,
)
from .log import (
    read_story as read_story,
)
from .model import (
    EpochStory as EpochStory,
    Ledger as Ledger,
    LossStory as LossStory,
    RunStory as RunStory,
    SaveStory as SaveStory,
    Span as Span,
    Story as Story,
)
from .page import (
    to_page as to_page,
    write_report as write_report,
)
