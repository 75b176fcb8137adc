"""What every text for people goes through: errors, log records, and all that commands print."""

from __future__ import annotations

import datetime
import functools
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

LONGEST_TEXT = 20_000
"""Characters of a message or a traceback that are shown."""

LONGEST_METRIC = 30
"""Characters of a string that a task reported, where it stands among other metrics."""

SCRIPT_PREFIX = "jobrunner_script_"
"""How the name of the module that a job's file becomes begins; see `cli.script`."""

_SCRIPT = re.compile(rf"\b{SCRIPT_PREFIX}([\w-]*\w)(?:[.:](?=\w))?")
# In a URL: what stands before "@", also if a secret there contains "/"; and what follows "?". A path
# that was made of a URL has one "/" after its scheme.
_URL = re.compile(r"\w\w:/")
_USER = re.compile(r"(?:(?<=://)|(?<=\w\w:/)(?!/))(?:[^/@]+|[^/:@]*:(?!\d{1,5}(?!\w))[^@]+)(?=@)")
_QUERY = re.compile(r"(://(?:(?!://)[^?])*[?])[^)>]+")
_WORD = re.compile(r"""[^\s'"]+""")


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text that is safe to show and to log.

    Escapes, as `repr` does, what is not printable: control characters but those in `kept`, and
    those that are invisible or turn the direction of writing. Leaves out credentials. Names what
    the job's file defines as ``job.py:Model``.
    """
    text = without_credentials(text)
    if SCRIPT_PREFIX in text:
        text = _SCRIPT.sub(_name_in_file, text)
    return text if text.isprintable() else text.translate(_escapes_but(kept))


def _name_in_file(match: re.Match[str]) -> str:
    module = sys.modules.get(SCRIPT_PREFIX + match[1])  # whose file may be "my job.py"
    file = getattr(module, "__file__", None) or f"{match[1]}.py"
    return os.path.basename(file) + (":" if match[0][-1] in ".:" else "")


class _Escapes(dict[int, str]):
    """What each character is shown as, found when one is first met: texts can be long."""

    def __init__(self, kept: str) -> None:
        self._kept = kept

    def __missing__(self, code: int) -> str:
        shown = chr(code)
        if not shown.isprintable() and shown not in self._kept:
            shown = shown.encode("unicode_escape").decode()
        self[code] = shown
        return shown


_escapes_but = functools.cache(_Escapes)


def without_credentials(text: str) -> str:
    """Leave out of each URL in a text what stands before its host, and its query."""
    if not _URL.search(text):
        return text
    return _WORD.sub(_without_credentials, text)


def _without_credentials(word: re.Match[str]) -> str:
    if not _URL.search(word[0]):
        return word[0]
    # Each URL before the last "@" has one after it: no search runs to the end of the word in vain.
    plain = word[0].replace("%40", "@")
    before, at, after = plain.rpartition("@")
    cleaned = _QUERY.sub(r"\1…", _USER.sub("…", before + at) + after)
    return word[0] if cleaned == plain else cleaned


def shorten(text: str, length: int = LONGEST_TEXT) -> str:
    """Leave out the middle of a text that is longer than `length`, and say how long it was."""
    if len(text) <= length:
        return text
    half = length // 2
    left_out = f"[{len(text):,} characters, of which the middle is left out]"
    return f"{text[:half]}\n... {left_out} ...\n{text[-half:]}"


def clip(text: str, length: int) -> str:
    """Leave out the end of a text that is longer than `length`, and credentials; for one line."""
    text = without_credentials(text)  # now: without the "@" after them, nobody would find them
    return text if len(text) <= length else f"{text[: length - 3]}..."


def listed(items: Iterable[str], most: int = 20, separator: str = ", ") -> str:
    """The first `most` items, and how many more there are; "none" if there are none."""
    texts = list(items)
    if not texts:
        return "none"
    text = separator.join(texts[:most])
    if len(texts) > most:
        text += f" and {len(texts) - most} more"
    return text


def counted_names(names: Collection[str]) -> str:
    """How many, and the first: ``2: a, b``, or ``none``."""
    return f"{len(names)}: {listed(names, 6)}" if names else "none"


def counted(number: int, noun: str) -> str:
    """``1 task``, ``2 tasks``, ``2 losses``."""
    if number != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{number} {noun}"


def format_seconds(seconds: float) -> str:
    """Format a duration in ms, s, min or h."""
    if not seconds:
        return "0 s"
    # What is shown chooses the unit: 59.96 s is a minute, not "60.0 s".
    milliseconds = seconds * 1e3
    if round(milliseconds, 2) < 10:
        return f"{milliseconds:.2f} ms"
    if round(milliseconds) < 1000:
        return f"{milliseconds:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_metrics(metrics: Mapping[str, object], most: int = 4) -> list[str]:
    """The first metrics that are a number, a flag or a string, each as ``name=value``."""
    return [f"{name}={text}" for name, text in islice(metric_texts(metrics), most)]


def whole_metrics(metrics: Mapping[str, Any], nodes: Collection[str]) -> dict[str, Any]:
    """The metrics that are not the value of one of these nodes."""
    names = frozenset(nodes)
    return {name: value for name, value in metrics.items() if name.partition("/")[0] not in names}


def metric_texts(metrics: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The metrics that are a number, a flag or a string, and what is shown of each."""
    for name, value in metrics.items():
        if name == "epoch":
            continue
        if isinstance(value, bool):
            yield name, str(value)
        elif isinstance(value, str):
            yield name, repr(clip(value, LONGEST_METRIC))
        else:
            with suppress(TypeError, ValueError, OverflowError):
                yield name, f"{float(value):.4g}"  # type: ignore[arg-type]


def format_time(time: str | float) -> str:
    """Format an ISO time, or a Unix time in seconds, as local time; another text stays as it is."""
    try:
        if isinstance(time, str):
            moment = datetime.datetime.fromisoformat(time)
        else:
            moment = datetime.datetime.fromtimestamp(time)
        return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return time if isinstance(time, str) else "unknown"


def format_value(value: object) -> str:
    """Format a recorded metric for a table, in at most 20 characters; nothing if there is none."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return clip(value if isinstance(value, str) else show(value), 20)


def show(value: object) -> str:
    """The `repr` of a value of any class; says so if that raises."""
    try:
        return repr(value)
    except Exception as error:  # of a class of the job; or an int of more than 4,300 digits
        kind = type(value).__name__
        return f"an object of type {kind} whose repr() raises {type(error).__name__}: {error}"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; its records are `printable`."""
    logger = logging.getLogger(name)
    logger.addFilter(_clean)
    return logger


def _clean(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    shown = printable(text)
    if shown != text:
        record.msg, record.args = shown, ()
    if record.exc_info and not record.exc_text:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return True


_LEAST_OF_UNIT = 0.9 * 1024


def format_bytes(count: int) -> str:
    """A number of bytes with a binary unit, for example ``1.50 GiB``, as Dask writes it.

    Dask's own function takes a tenth of a second to import, which commands that only list would wait for.
    """
    if count < _LEAST_OF_UNIT:
        return f"{count} B"
    size = count / 1024
    units = ["kiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= _LEAST_OF_UNIT and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.2f} {units[0]}"
