from .find import (
    LiveRuns as LiveRuns,
    RunSearch as RunSearch,
    RunSummary as RunSummary,
    best_of as best_of,
    find_runs as find_runs,
    open_run as open_run,
    refuse_directory_of_runs as refuse_directory_of_runs,
    summarize_run as summarize_run,
)
from .live import (
    ENDS as ENDS,
    RunNow as RunNow,
    RunState as RunState,
)
from .log import (
    read_story as read_story,
)
from .model import (
    OUTCOMES as OUTCOMES,
    EpochStory as EpochStory,
    Ledger as Ledger,
    LossStory as LossStory,
    RunStory as RunStory,
    Story as Story,
)
from .page import (
    to_page as to_page,
    write_report as write_report,
)
from .places import (
    IS_SHOWN as IS_SHOWN,
    RUNS as RUNS,
    ToldRun as ToldRun,
)
from .render import (
    draw_html as draw_html,
)
from .live_view import (
    show_lines as show_lines,
    show_on as show_on,
    show_run as show_run,
)
