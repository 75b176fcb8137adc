"""Record a terminal session as an animated SVG: ``python docs/images/record.py docs/images/kill.svg``.

The commands run for real, in a pseudo-terminal and a new directory. What they print is kept with the
time, and drawn by ``pyte``; long waits are shortened.
"""

from __future__ import annotations

import html
import os
import pty
import select
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pyte

COLUMNS, LINES = 96, 20
WIDTH, HEIGHT, MARGIN = 8.4, 18, 14  # of a character, of a line, around all; in pixels
LONGEST_WAIT, LAST_LOOK, SHORTEST = 0.8, 5.0, 0.1  # seconds
ROOT = Path(__file__).parents[2]

RUN = "jobrunner run heat.py --checkpoint runs/heat --workers 2"
STORY = (
    (f"{RUN} & sleep 6; kill -9 $!", 8.0),
    ("clear; jobrunner ls runs/heat --last 2", 3.0),
    (RUN, 25.0),
)
"""Commands, and how long to watch each."""

COLORS = {
    "default": "#d7dce2",
    "black": "#5c6773",
    "red": "#f07178",
    "green": "#a5d36c",
    "brown": "#ffcc66",
    "blue": "#59b5f5",
    "magenta": "#d2a6ff",
    "cyan": "#73d0c8",
    "white": "#ffffff",
}

Span = tuple[str, str, bool]  # text, colour, whether it is bold
Screen = tuple[tuple[Span, ...], ...]


def play(directory: str) -> Iterator[tuple[float, Screen]]:
    """Run the story; yield what is on the screen whenever that changes, and when."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": directory, "PS1": "$ ", "TERM": "xterm-256color"}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        os.execvpe("bash", ["bash", "--norc", "--noprofile"], environment)
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    shown, before = 0.0, time.monotonic()
    last: Screen = ()

    def watch(seconds: float) -> Iterator[tuple[float, Screen]]:
        nonlocal shown, before, last
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([terminal], [], [], left)[0]:
                break
            stream.feed(os.read(terminal, 1 << 16))
            now = tuple(_line(screen, row) for row in range(LINES))
            if now != last:
                shown += min(time.monotonic() - before, LONGEST_WAIT)
                before, last = time.monotonic(), now
                yield shown, now

    yield from watch(0.5)
    for command, seconds in STORY:
        for letter in command:
            os.write(terminal, letter.encode())
            yield from watch(0.03)
        os.write(terminal, b"\n")
        yield from watch(seconds)
    os.write(terminal, b"exit\n")
    os.close(terminal)
    os.waitpid(process, 0)


def _move(screen: Screen, directory: str) -> Screen:
    """The screen, as if the commands had run elsewhere."""
    return tuple(
        tuple((text.replace(directory, "/home/you"), *look) for text, *look in line)
        for line in screen
    )


def _line(screen: pyte.Screen, row: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    for column in range(COLUMNS):
        char = screen.buffer[row][column]
        look = (COLORS.get(char.fg, f"#{char.fg}"), char.bold)
        if spans and spans[-1][1:] == look:
            spans[-1] = (spans[-1][0] + char.data, *look)
        else:
            spans.append((char.data, *look))
    while spans and not spans[-1][0].strip():
        spans.pop()
    if spans:
        spans[-1] = (spans[-1][0].rstrip(), *spans[-1][1:])
    return tuple(spans)


def draw(frames: Sequence[tuple[float, Screen]]) -> str:
    """Draw the frames as an SVG that repeats; where nothing moves, the last one is seen."""
    begin, end = frames[0][0], frames[-1][0] + LAST_LOOK
    width, height = COLUMNS * WIDTH + 2 * MARGIN, LINES * HEIGHT + 2 * MARGIN
    shapes = []
    for row in range(LINES):
        changes = [(begin, frames[0][1][row])]
        for at, screen in frames[1:]:
            if screen[row] != changes[-1][1]:
                changes.append((at, screen[row]))
        ends = [at for at, _ in changes[1:]] + [end]
        shapes += [
            _text(spans, row, since - begin, until - begin, is_last=until == end)
            for (since, spans), until in zip(changes, ends, strict=True)
            if spans
        ]
    drawn = "\n".join(shapes)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">
<title>A job is killed with kill -9, and resumed from its last recorded epoch</title>
<style>text{{font:14px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre}}</style>
<rect width="{width:.0f}" height="{height}" rx="8" fill="#1f2430">
<animate id="loop" attributeName="rx" values="8;8" begin="0s;loop.end" dur="{end - begin:.2f}s"/></rect>
{drawn}
</svg>
"""


def _text(spans: Sequence[Span], row: int, since: float, until: float, *, is_last: bool) -> str:
    drawn = "".join(
        f'<tspan fill="{color}"{weight}>{html.escape(text)}</tspan>'
        for text, color, is_bold in spans
        for weight in [' font-weight="bold"' if is_bold else ""]
    )
    letters = sum(len(text) for text, *_ in spans)
    return (
        f'<text x="{MARGIN}" y="{MARGIN + (row + 0.75) * HEIGHT:.1f}" '
        f'visibility="{"visible" if is_last else "hidden"}" '
        f'textLength="{letters * WIDTH:.1f}" lengthAdjust="spacingAndGlyphs">{drawn}'
        f'<set attributeName="visibility" to="hidden" begin="loop.begin" dur="{since + 0.01:.2f}s"/>'
        f'<set attributeName="visibility" to="visible" begin="loop.begin+{since:.2f}s" '
        f'dur="{until - since:.2f}s"/></text>'
    )


def main() -> None:
    """Record the story and write the drawing."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(ROOT / "examples" / "heat.py", directory)
        frames = [(at, _move(screen, directory)) for at, screen in play(directory)]
        ends = [at for at, _ in frames[1:]] + [float("inf")]
        kept = [it for it, until in zip(frames, ends, strict=True) if until - it[0] > SHORTEST]
        Path(sys.argv[1]).write_text(draw(kept))


if __name__ == "__main__":
    main()
