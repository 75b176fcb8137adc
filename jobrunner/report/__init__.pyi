from .ledger import (
    Ledger as Ledger,
)
from .page import (
    to_page as to_page,
    write_report as write_report,
)
from .reader import (
    read_story as read_story,
)
from .runs import (
    DEPTH as DEPTH,
    LiveRun as LiveRun,
    LiveRuns as LiveRuns,
    RunSummary as RunSummary,
    best_of as best_of,
    find_runs as find_runs,
    open_run as open_run,
    summarize_run as summarize_run,
)
from .story import (
    EpochStory as EpochStory,
    LossStory as LossStory,
    RunStory as RunStory,
    SaveStory as SaveStory,
    Span as Span,
    Story as Story,
)
