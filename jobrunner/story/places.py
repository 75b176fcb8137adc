"""Where a run is shown: on a terminal, in a file or pipe, in a notebook, on a scheduler's dashboard."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from msgspec import Struct, structs, to_builtins
from rich.console import Console
from rich.live import Live as LiveLines
from rich.text import Text

from jobrunner.json_output import to_json
from jobrunner.story.live import MOST_INT, RunNow
from jobrunner.story.render import draw_html, draw_line, draw_lines, position
from jobrunner.texts import counted, folded, format_seconds, join, listed, printable, tag

if TYPE_CHECKING:
    from distributed import Client

RUNS, IS_SHOWN = "jobrunner", "jobrunner-dashboard"
"""Keys of the scheduler's metadata: client -> job -> what is told of its run; whether it shows runs."""
TELL_SECONDS = 5.0
"""How long a scheduler may take to be told of a run."""
TOLD_NODES = 1000  # to a scheduler
SHOWN_NODES, SHOWN_WORKERS = 4, 8
"""How many nodes of a worker a placement names, and how many workers."""
KEPT_LINES = 200
"""How many of the lines that stay a notebook keeps: it saves them."""


class View:
    """A way to show a run. One thread calls it."""

    interval_seconds = 1.0
    """What is new is drawn at most once in so long."""
    repeat_seconds = 60.0
    """It is drawn again after so long without anything new."""
    shows_lines = True
    """Whether it shows what is logged."""

    def open(self) -> None:
        """Begin."""

    def tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """Show an event."""

    def draw(self, run: RunNow) -> None:
        """Show a state in place of the one before."""

    def close(self) -> None:
        """End; what was drawn last stays."""


def placement_text(workers: Mapping[str, Sequence[str]]) -> str:
    """Which nodes are on which worker."""
    nodes = sum(map(len, workers.values()))
    parts = [f"{worker}: {listed(names, SHOWN_NODES)}" for worker, names in workers.items()]
    where = f"{counted(nodes, 'node')} on {counted(len(workers), 'worker')}"
    return f"{where} ({listed(parts, SHOWN_WORKERS, '; ')})"


def event_text(event: str, facts: Mapping[str, Any]) -> str:
    """What stays on the screen of an event; empty: nothing."""
    match event:
        case "placement":
            return placement_text(facts["workers"])
        case "start":
            return str(facts["text"])
        case "warning":
            return f"{facts['level']}: {facts['message']}"
        case "recovery":
            seconds = format_seconds(facts["seconds"])
            step = f", step {facts['step']}" if facts["step"] else ""
            return f"recovered after {seconds}; continues from epoch {facts['epoch']}{step}"
        case "stop_asked":
            return (
                f"{facts['reason']}: the run ends once its epoch is recorded; {facts['at_once']} "
                f"ends it now."
            )
    return ""


# ---- streams


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; there may be none, or it is closed."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


class TolerantStream:
    """A stream that ignores errors: a job continues when the reader of its output is gone."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if that works."""
        if self._stream is None:
            return len(text)
        with contextlib.suppress(OSError, ValueError):  # the latter: it is closed
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:  # it has no characters for bars, say
                replaced = text.encode(error.encoding, "replace").decode(error.encoding)
                return self._stream.write(replaced)
        return len(text)

    def flush(self) -> None:
        """Flush, if that works."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Terminal(View):
    """Draws on the last lines of a terminal; what stays is written above them."""

    interval_seconds = repeat_seconds = 0.2

    def __init__(self, stream: TextIO) -> None:
        file = cast("TextIO", TolerantStream(stream))
        self._console = Console(file=file, markup=False, emoji=False, highlight=False)
        # What this process prints goes above the bar, unless the user has redirected it elsewhere.
        self._lines = LiveLines(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._has_begun = False

    def open(self) -> None:
        """Begin to draw."""
        self._lines.start()

    def tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write an event that needs words, above the bar."""
        text = event_text(event, facts)
        if text:
            self._console.print(Text(printable(text)))

    def draw(self, run: RunNow) -> None:
        """Draw a state in place of the one before."""
        self._has_begun = run.phase != "starting"
        width, height = self._console.size
        self._lines.update(draw_lines(run, width, height), refresh=True)

    def close(self) -> None:
        """End; a run that did not start leaves nothing behind."""
        self._lines.transient = not self._has_begun
        self._lines.stop()


class Lines(View):
    """Lines of text, for people: one for each event and each drawing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = TolerantStream(stream)

    def tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write an event that needs words."""
        text = printable(event_text(event, facts))
        if event == "stop_asked":  # a user waits for it, wherever the lines go
            with contextlib.suppress(OSError):  # Ctrl-C may have ended its reader, such as `tee`
                os.write(2, f"\n{text}\n".encode())
        elif text:
            self._write(text)

    def draw(self, run: RunNow) -> None:
        """Write a state as a line, if there is more to say than where it stands."""
        text = draw_line(run)
        if text != position(run):
            self._write(printable(text, kept=""))

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


class JSONLines(View):
    """JSON objects, one a line, for programs: `docs/watching.md` describes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = TolerantStream(stream)

    def tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write an event."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = to_json({"event": event, "time": now, **facts})
        self._stream.write(f"{json.dumps(line, allow_nan=False)}\n")
        self._stream.flush()

    def draw(self, run: RunNow) -> None:
        """Write a state."""
        self.tell("state", to_builtins(run))


# ---- a notebook


class Notebook(View):
    """Draws in the output of the cell that runs now; where that shows no HTML, as one line."""

    interval_seconds = repeat_seconds = 0.5

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def open(self) -> None:
        """Begin to draw."""
        from IPython import display as ipython

        display: Any = ipython.display
        forms = {"text/plain": "", "text/html": ""}
        self._handle = display(forms, raw=True, display_id=True)

    def tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """Add an event that needs words to the lines that stay."""
        self._lines.extend(printable(event_text(event, facts)).splitlines())

    def draw(self, run: RunNow) -> None:
        """Draw a state in place of the one before."""
        if run.phase == "stopped":  # IPython says why, just below
            run = structs.replace(run, error="")
        page = draw_html(run)
        if self._lines:
            style = "max-height: 20em; overflow: auto; white-space: pre-wrap"
            lines = tag("pre", join(f"{line}\n" for line in self._lines), style=style)
            page = join([page, folded("plan and warnings", lines)])
        line = printable(f"{run.job}: {draw_line(run)}", kept="")
        self._handle.update({"text/plain": line, "text/html": str(page)}, raw=True)


# ---- a scheduler's dashboard


class ToldRun(Struct):
    """What a client tells a scheduler of a run."""

    time: float  # Unix time
    run: RunNow


def has_dashboard(client: Client) -> bool:
    """Whether the scheduler has loaded `jobrunner.dashboard`."""
    if client.status != "running":
        return False
    with contextlib.suppress(Exception):  # then nothing is shown there
        scheduler: Any = client.scheduler
        shown = client.sync(
            scheduler.get_metadata, keys=[IS_SHOWN], default=None, callback_timeout=TELL_SECONDS
        )
        return shown is not None
    return False


class Dashboard(View):
    """Tells a scheduler, which shows runs on its dashboard, what is known of a run."""

    repeat_seconds = 1.0
    shows_lines = False

    def __init__(self, client: Client) -> None:
        self._client = client

    def draw(self, run: RunNow) -> None:
        """Send a state."""
        # Dask's messages have ints of 64 bits, and no text that is not Unicode.
        metrics = {}
        for name, value in run.metrics.items():
            if not isinstance(value, int) or abs(value) <= MOST_INT:
                metrics[printable(name)] = value
        sent = structs.replace(run, nodes=run.nodes[:TOLD_NODES], metrics=metrics)
        keys = [RUNS, self._client.id, printable(run.job)]
        message = to_builtins(ToldRun(time.time(), sent))
        with contextlib.suppress(Exception):  # the run notices itself that it is alone
            scheduler: Any = self._client.scheduler
            self._client.sync(
                scheduler.set_metadata, keys=keys, value=message, callback_timeout=TELL_SECONDS
            )
