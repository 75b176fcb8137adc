"""What stores the log, and the default: one file for each entry."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from jobrunner.checkpoint.log.entries import Entry
from jobrunner.checkpoint.storage import FILES, Files, PosixFiles, files_of, join_path
from jobrunner.define import checked
from jobrunner.errors import CheckpointCorruptError, CheckpointWriteError
from jobrunner.names import LOG_DIRECTORY
from jobrunner.texts import get_logger

logger = get_logger(__name__)

MOST_ENTRY_BYTES = 8 << 20
"""The size of an entry's file, at most."""
_MOST_STATE_BYTES = 1 << 30

_NUMBER = "[0-9]{10}|[1-9][0-9]{10,}"
_NAME = re.compile(
    rf"\.?(?:state|(?P<number>{_NUMBER}))\.json(?P<damaged>\.damaged)?(?P<temporary>\.[0-9a-f]+\.tmp)?"
)
_MOST_MISSING = 2_000

_HEAD = b'{"sha256":"%s","entry":'
_TAIL = b"}\n"
_DIGEST = slice(_HEAD.index(b"%s"), _HEAD.index(b"%s") + 64)  # in a file
_TEXT = slice(len(_HEAD) - len(b"%s") + 64, -len(_TAIL))


@runtime_checkable
class MetadataHandler(Protocol):
    """Stores the entries of one directory's log, and so decides which epochs exist.

    An entry is JSON (a dict) with, among others, the keys ``number`` (0, 1, 2, ...), ``kind`` and
    ``id``. The manager makes and interprets entries. A handler stores them for ever, in order, and
    never lets two share a number. A handler must pass the tests in `jobrunner.testing.contracts`.
    """

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """Set the directory and its nodes. Accesses no storage.

        Called before all other methods, and again, with the same path, when a run begins.
        """

    def append(self, entry: Entry) -> bool:
        """Store `entry` under its number, unless that number is taken.

        Returns
        -------
        bool
            True: the entry is durable, and every later read returns it. False: another entry has
            the number and stays unchanged.

        Raises
        ------
        Exception
            The entry may or may not be stored; the caller reads the log to find out.

        Notes
        -----
        *Atomicity*: readers see the whole entry or none. Of several appends under one number, from
        any process, exactly one returns True.
        """

    def last_number(self) -> int:
        """Highest number that is taken; -1 for an empty log."""

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """Iterate over all entries from number `first` on, in order; none if the log is empty.

        Raises
        ------
        CheckpointCorruptError
            An entry is damaged, or missing although a later one exists.
        OSError
            Reading failed.
        """


class LogFile(NamedTuple):
    """What the name of a file of the log says."""

    kind: Literal["entry", "state", "damaged", "temporary"]
    number: int  # -1: it is not that of an entry


def parse_file_name(name: str) -> LogFile | None:
    """Parse the name of a file in ``_log/``; None if it is none that this handler gives."""
    match = _NAME.fullmatch(name)
    if match is None or name.startswith(".") != bool(match["temporary"]):
        return None
    number = int(match["number"] or -1)
    if match["temporary"]:
        return LogFile("temporary", number)
    if match["damaged"]:
        return LogFile("damaged", number)
    if number < 0:
        return LogFile("state", number)
    return LogFile("entry", number)


class FileMetadataHandler:
    """The default handler: one file for each entry, in ``_log/`` of the checkpoint directory.

    Parameters
    ----------
    files : Files, optional

    Notes
    -----
    Entry 7 is ``_log/0000000007.json``. Of several writers exactly one succeeds in creating it. The
    file is durable before `append` returns, and contains the digest of its entry.
    """

    @checked
    def __init__(self, files: Annotated[Files, FILES] | None = None) -> None:
        self._given = files
        self._files = files or PosixFiles()
        self._directory = ""

    def set_params(self, path: str, node_names: Sequence[str]) -> None:
        """See `MetadataHandler`."""
        self._files = files_of(path, self._given)
        self._directory = join_path(path, LOG_DIRECTORY)

    def path_of(self, number: int) -> str:
        """Path of an entry's file."""
        return os.path.join(self._directory, f"{number:010d}.json")

    # --- entries

    def append(self, entry: Entry) -> bool:
        """See `MetadataHandler`."""
        if entry["number"] == 0:
            self._files.make_directories(self._directory)
        return self._files.create(self.path_of(entry["number"]), encode_entry(entry))

    def last_number(self) -> int:
        """See `MetadataHandler`."""
        numbers = []
        for name in self._files.list_names(self._directory):
            file = parse_file_name(name)
            if file is not None and file.kind == "entry":
                numbers.append(file.number)
        last = max(numbers, default=-1)
        # Of a stray file 9999999999.json, a command would look for all that are missing before it, and
        # not end.
        if last > _MOST_MISSING + 10 * len(numbers):
            path = self.path_of(last)
            raise CheckpointCorruptError(
                f"{path} is no entry of the log, or nearly all others are lost: expected entries "
                f"without gaps, found {len(numbers)}. Restore the others from a copy. If there were "
                f"none, move this file out of the directory.",
                path=path,
            )
        return last

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """See `MetadataHandler`."""
        number, count = first, 1
        while True:
            # Reads twice as many at once each time, up to as many as the storage answers together: a
            # writer looks for one entry that is not there, a command for thousands that are.
            count = min(2 * count, self._files.lookups)
            for entry in list(self._files.each(self._read, range(number, number + count))):
                if entry is None:
                    if not self._files.is_taken(self.path_of(number + 1)):
                        return
                    path = self.path_of(number)
                    raise CheckpointCorruptError(
                        f"Entry {number} of the log is missing: expected {path}, because entry "
                        f"{number + 1} exists.",
                        path=path,
                    )
                if isinstance(entry, CheckpointCorruptError):
                    raise entry
                yield entry
                number += 1

    def entry(self, number: int) -> Entry | None:
        """Read one entry, and nothing ahead; None if there is none."""
        entry = self._read(number)
        if isinstance(entry, CheckpointCorruptError):
            raise entry
        return entry

    def _read(self, number: int) -> Entry | CheckpointCorruptError | None:
        """An entry, or why it is damaged; None if there is none."""
        path = self.path_of(number)
        try:
            data = self._files.read(path, MOST_ENTRY_BYTES)
            if data is None:
                return None
            return decode_entry(data, number, path)
        except CheckpointCorruptError as error:
            return error
        except IsADirectoryError:
            return CheckpointCorruptError(f"{path} is a directory.", path=path)

    def replace(self, entry: Entry) -> None:
        """Put an entry, durably, in the place of one that is damaged or missing.

        Keeps what was there, and forgets the state. No run uses the directory meanwhile.
        """
        with contextlib.suppress(FileNotFoundError):
            self._files.remove_file(self._state_path)
        path = self.path_of(entry["number"])
        try:
            damaged = self._files.read(path, _MOST_STATE_BYTES)
        except IsADirectoryError as error:
            raise CheckpointWriteError(
                f"{path} is a directory; expected an entry of the log. Move it away, then repair."
            ) from error
        if damaged is not None:
            # Another repair may have kept it before it was stopped.
            self._files.create(f"{path}.damaged", damaged)
        self._files.put(path, encode_entry(entry), durable=True)

    def remove_leftovers(self, number: int) -> None:
        """Remove the temporary files of entries up to `number`, which must exist."""
        try:
            for name in self._files.list_names(self._directory):
                file = parse_file_name(name)
                if file is not None and file.kind == "temporary" and file.number <= number:
                    self._files.remove_file(join_path(self._directory, name))
        except OSError as error:
            logger.warning("Cannot remove temporary files in %s: %s", self._directory, error)

    # --- the state

    def state(self) -> bytes | None:
        """The state that was kept, so that opening a directory reads few entries."""
        path = self._state_path
        try:
            data = self._files.read(path, _MOST_STATE_BYTES)
            if data is None:
                return None
            return unframe(data, path, f"{path}, a state of the log,")
        except (CheckpointCorruptError, IsADirectoryError) as error:
            # It only says what the entries say, too.
            logger.warning("Reading the log without its state: %s", error)
            return None

    def keep_state(self, state: bytes) -> None:
        """Keep a state; one that is older, or of another log, does no harm."""
        self._files.put(self._state_path, frame(state))

    @property
    def _state_path(self) -> str:
        return join_path(self._directory, "state.json")


def frame(text: bytes) -> bytes:
    """The content of a file of the log: its text, with its digest."""
    return _HEAD % hashlib.sha256(text).hexdigest().encode() + text + _TAIL


def unframe(data: bytes, path: str, subject: str) -> bytes:
    """The text in a file of the log, called `subject`; raises CheckpointCorruptError if it is damaged."""
    text = data[_TEXT]
    if data == frame(text):
        return text
    start = _HEAD[: _DIGEST.start]
    if not data.startswith(start):
        present = data[: len(start)].decode("ascii", "replace")
        raise CheckpointCorruptError(
            f"{subject} is empty, or not what jobrunner writes there: expected it to begin with "
            f"{start.decode()!r}, found {present!r}.",
            path=path,
        )
    expected = data[_DIGEST].decode("ascii", "replace")
    digest = hashlib.sha256(text).hexdigest()
    raise CheckpointCorruptError(
        f"{subject} is cut or changed: expected SHA-256 {expected!r}, found {digest!r}.",
        path=path,
    )


def encode_entry(entry: Entry) -> bytes:
    """The content of an entry's file."""
    content = frame(msgspec.json.encode(entry))
    if len(content) > MOST_ENTRY_BYTES:
        raise CheckpointWriteError(
            f"Entry {entry['number']} ({entry['kind']}) of the log would be too large: it has more "
            f"than {MOST_ENTRY_BYTES:,} bytes. Use another directory: `jobrunner copy` takes the "
            f"epochs there that you need."
        )
    return content


def decode_entry(data: bytes, number: int, path: str) -> dict[str, Any]:
    """The entry in a file; raises CheckpointCorruptError if it is damaged or another entry."""
    text = unframe(data, path, f"Entry {number} of the log, {path},")
    try:
        entry = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        problem = f"is no entry of the log: it is no JSON: {error}."
        raise CheckpointCorruptError(f"{path} {problem}", path=path) from None
    contained = None
    if isinstance(entry, dict):
        contained = entry.get("number")
    if type(contained) is not int or contained != number:
        raise CheckpointCorruptError(
            f"{path} contains entry {contained}; expected entry {number}.", path=path
        )
    return entry  # type: ignore[no-any-return]
