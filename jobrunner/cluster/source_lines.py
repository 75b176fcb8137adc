"""Source lines in the tracebacks of workers, which often lack the files of the job."""

from __future__ import annotations

import linecache
import re
import sys

_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<number>\d{1,9}), in .*\n(?!    )', re.M)


def with_source_lines(trace: str) -> str:
    """Add what this process has loaded of the code that a traceback names without its lines.

    Other files are not read: the traceback comes from another machine.
    """
    loaded = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}

    def add_line(frame: re.Match[str]) -> str:
        file, line = frame["file"], ""
        if file in loaded or file in linecache.cache:  # where IPython puts its cells, too
            line = linecache.getline(file, int(frame["number"])).strip()
        return f"{frame[0]}    {line}\n" if line else frame[0]

    return _FRAME.sub(add_line, trace)
