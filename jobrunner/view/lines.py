"""Views for files and pipes: a line for each event and each drawing."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Mapping
from typing import Any, TextIO

from jobrunner.json_output import to_json
from jobrunner.texts import printable
from jobrunner.view import wording


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
                known = text.encode(error.encoding, "replace").decode(error.encoding)
                return self._stream.write(known)
        return len(text)

    def flush(self) -> None:
        """Flush, if that works."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Lines:
    """Lines of text, for people."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = TolerantStream(stream)

    def open(self) -> None:
        """Nothing to begin."""

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Write an event that needs words."""
        text = printable(wording.told(event, about))
        if event == "stop_asked":  # a user waits for it, wherever the lines go
            with contextlib.suppress(OSError):  # Ctrl-C may have ended its reader, such as `tee`
                os.write(2, f"\n{text}\n".encode())
        elif text:
            self._write(text)

    def draw(self, known: Mapping[str, Any]) -> None:
        """Write a state as a line, if there is more to say than where it stands."""
        if (text := wording.line(known)) != wording.position(known):
            self._write(printable(text, kept=""))

    def close(self) -> None:
        """Nothing to end."""

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


class JSONLines:
    """JSON objects, one a line, for programs: `docs/watching.md` describes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = TolerantStream(stream)

    def open(self) -> None:
        """Nothing to begin."""

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Write an event."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        about = {"event": event, "time": now, **about}
        self._stream.write(f"{json.dumps(to_json(about), allow_nan=False)}\n")
        self._stream.flush()

    def draw(self, known: Mapping[str, Any]) -> None:
        """Write a state."""
        self.tell("state", known)

    def close(self) -> None:
        """Nothing to end."""
