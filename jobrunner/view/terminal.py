"""A view on a terminal: some lines at its end, which change; what stays is written above them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jobrunner.texts import abbreviate, counted, format_seconds, printable
from jobrunner.view import wording
from jobrunner.view.lines import TolerantStream, is_terminal

BAR_WIDTH, NODE_BAR_WIDTH, DOES_WIDTH = 20, 10, 26
GAP = "  "
SHORTEST_METRIC = len(f"a=1{GAP}")
DOING = {
    "runs": "running",
    "saves": "saving",
    "waits": "waiting",
    "ended": "ended",
    "saved": "saved",
}
"""What nodes do, the most telling first; and how that is said of many."""


class Terminal:
    """Draws on the last lines of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(
            file=cast("TextIO", TolerantStream(stream)), markup=False, emoji=False, highlight=False
        )
        # What this process prints goes above the bar, unless the user has redirected it elsewhere.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._known: Mapping[str, Any] = {"phase": "starting"}

    def open(self) -> None:
        """Begin to draw."""
        self._live.start()

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Write an event that needs words, above the bar."""
        if text := wording.told(event, about):
            self._console.print(Text(printable(text)), soft_wrap=event == "print")

    def draw(self, known: Mapping[str, Any]) -> None:
        """Draw a state in place of the one before."""
        self._known = known
        width, height = self._console.size
        self._live.update(render(known, width, height - 1), refresh=True)

    def close(self) -> None:
        """End; a run that did not start leaves nothing behind."""
        self._live.transient = self._known["phase"] == "starting"
        self._live.stop()


def render(known: Mapping[str, Any], width: int, height: int) -> Group:
    """A state in lines of at most `width` cells, and about as many lines as `height` says.

    No metric and no save is cut: what does not fit a line is continued in the next. Of metrics that
    do not fit the screen, and of nodes, it is said how many more there are.
    """
    share = wording.share(known)
    head = [Text(_plain(known["job"]), "bold")] if known["job"] else []
    started = known["phase"] != "starting"
    head.append(Text(wording.position(known) if started else "starting"))
    if share is not None:
        head += [Text(_bar(share, BAR_WIDTH), "green"), Text(f"{share:.0%}")]
    head.append(Text(format_seconds(known["seconds"])))
    head += map(Text, wording.times(known))
    if known["phase"] in ("init", "loading"):  # a recovery is among the troubles
        head.append(Text(wording.PHASES[known["phase"]], "bold magenta"))
    about = [*map(Text, wording.saves(known))]
    about += [Text(text, "bold red") for text in wording.troubles(known)]
    about += map(Text, wording.workers(known))
    top = [*flow(head, width), *flow(about, width)]
    rows = wording.nodes(known)
    room = max(1, height - len(top) - min(len(rows), height // 2))
    most = min(len(known["metrics"]), room * width // SHORTEST_METRIC)
    while True:
        metrics = flow(map(Text, map(_plain, wording.metrics(known, most))), width)
        if len(metrics) <= room or most <= 1:
            break
        most = most * 3 // 4
    lines = [*top, *metrics]
    # What is printed above needs half of the screen.
    return Group(*lines, *_nodes(rows, width, max(1, min(height // 2, height - len(lines)))))


def flow(items: Iterable[Text], width: int) -> list[Text]:
    """Put items into lines, whole; one that is wider than a line continues in the next."""
    lines: list[Text] = []
    for item in items:
        size = item.cell_len
        if lines and lines[-1].cell_len + len(GAP) + size <= width:
            lines[-1].append(GAP).append_text(item)
        elif size <= width:
            lines.append(Text().append_text(item))
        else:
            lines += [Text(part, item.style) for part in chop_cells(item.plain, width)]
    return lines


def _nodes(rows: list[wording.Node], width: int, height: int) -> list[Text]:
    if len(rows) <= height:
        shown, others = rows, []
    else:
        rows = sorted(rows, key=lambda row: [*DOING, ""].index(_verb(row)))
        shown, others = rows[: height - 1], rows[height - 1 :]
    names, lines = [_plain(row.name) for row in shown], []
    widest = max(map(cell_len, names), default=0)
    room = min(widest, max(width // 3, width - NODE_BAR_WIDTH - DOES_WIDTH))
    for name, row in zip(names, shown, strict=True):
        line = Text(abbreviate(name, room, cell_len))
        line.pad_right(room - line.cell_len)
        bar = " " * NODE_BAR_WIDTH if row.share is None else _bar(row.share, NODE_BAR_WIDTH)
        line.append(f" {bar} {_plain(row.does)}")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if others:
        verbs = Counter(DOING[verb] for verb in map(_verb, others) if verb)
        does = ", ".join(f"{count} {verb}" for verb, count in verbs.items())
        text = f"and {counted(len(others), 'more node')}" + (f": {does}" if does else "")
        lines.append(Text(text, overflow="ellipsis", no_wrap=True))
    return lines


def _verb(row: wording.Node) -> str:
    return row.does.partition(" ")[0]


def _bar(share: float, width: int) -> str:
    done = int(share * width)
    return "━" * done + "─" * (width - done)


def _plain(text: str) -> str:
    return printable(text, kept="")
