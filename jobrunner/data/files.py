"""Readers of files of lines and of CSV files, in blocks of about a MiB."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from jobrunner.data.arrow import Paths, import_arrow, missing
from jobrunner.data.blocks import Blocks
from jobrunner.data.indexed import Indexed
from jobrunner.data.reader import DataReader, reader_of
from jobrunner.define import Rule, checked
from jobrunner.errors import DefinitionError

_BLOCK_BYTES = 1 << 20


def _is_encoding(name: object) -> bool:
    try:
        return isinstance(name, str) and "\n".encode(name) == b"\n"
    except LookupError:
        return False


_ENCODING = Rule("the name of an encoding in which a newline is one byte", _is_encoding)


@checked
def from_lines(paths: Paths, *, encoding: Annotated[str, _ENCODING] = "utf-8") -> DataReader:
    r"""A reader of the lines of text files, without their ends (``\n`` or ``\r\n``).

    Parameters
    ----------
    paths : path or list of paths
        Read in this order, as if they were one file.
    encoding : str

    Raises
    ------
    DefinitionError
        If an argument is none of these.
    OSError
        If a file cannot be read.

    Notes
    -----
    The lines are counted when the reader is made: the files are read once then. A block of a shuffled
    reader is about 1 MiB.

    Examples
    --------
    >>> from pathlib import Path
    >>> _ = Path("words.txt").write_text("one\ntwo\nthree\n")
    >>> list(from_lines("words.txt").batched(2))
    [['one', 'two'], ['three']]
    """
    blocks = [each for path in _listed(paths, "from_lines") for each in _split(path, _lines)]
    return reader_of(Indexed, Blocks([each.records for each in blocks], _Lines(blocks, encoding)))


_DELIMITER = Rule("one character (str)", lambda value: isinstance(value, str) and len(value) == 1)
_TYPES = Rule(
    "a mapping of names of columns to types of Arrow, or their names",
    lambda it: isinstance(it, Mapping) and all(isinstance(name, str) for name in it),
)


@checked
def from_csv(
    paths: Paths,
    *,
    types: Annotated[Mapping[str, Any], _TYPES] | None = None,
    delimiter: Annotated[str, _DELIMITER] = ",",
) -> DataReader:
    """A reader of the rows of CSV files; a batch is an Arrow table, a single row a dict.

    The first line of each file has the names of the columns, the same in all files.

    Parameters
    ----------
    paths : path or list of paths
        Read in this order, as if they were one file.
    types : mapping of str to pyarrow.DataType or str, optional
        The types of columns. Those of others are what the first block of rows looks like.
    delimiter : str

    Raises
    ------
    DefinitionError
        If an argument is none of these, the files have other columns, or pyarrow is not installed.
    OSError
        If a file cannot be read.

    Notes
    -----
    The rows are counted when the reader is made: the files are read once then. A block of a shuffled
    reader is about 1 MiB. Blank lines are no rows. Values must not contain newlines.
    """
    arrow = import_arrow("from_csv")
    listed = _listed(paths, "from_csv")
    headers = [_header(path, delimiter) for path in listed]
    for path, header in zip(listed, headers, strict=True):
        if header.names != headers[0].names:
            raise DefinitionError(
                f"from_csv: all files must have the same columns; expected {headers[0].names} as in "
                f"{listed[0]}, found {header.names} in {path}."
            )
    known = {name: _type(arrow, name, kind) for name, kind in (types or {}).items()}
    if unknown := sorted(set(known) - set(headers[0].names)):
        raise DefinitionError(
            f"from_csv: types must name columns of the files; found {unknown}, expected some of "
            f"{headers[0].names}."
        )
    blocks = [
        each
        for path, header in zip(listed, headers, strict=True)
        for each in _split(path, _filled, header.size)
    ]
    lengths = [each.records for each in blocks]
    load = _Rows(blocks, headers[0].names, delimiter, known)
    if blocks:
        first = Blocks(lengths, load).part(0, 1).get(slice(0, 1))
        load = load._replace(types={field.name: field.type for field in first.schema})
    return reader_of(Indexed, Blocks(lengths, load))


class _Part(NamedTuple):
    """Whole lines of a file."""

    path: str
    start: int
    size: int
    records: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    @property
    def where(self) -> str:
        return f"{self.path}, bytes {self.start} to {self.start + self.size}"


class _Lines(NamedTuple):
    """Loads blocks of lines."""

    blocks: Sequence[_Part]
    encoding: str

    def __call__(self, number: int) -> list[str]:
        text = self.blocks[number].read().decode(self.encoding)
        lines = text.removesuffix("\n").split("\n")
        return [line.removesuffix("\r") for line in lines] if "\r" in text else lines

    def where(self, number: int) -> str:
        return self.blocks[number].where


class _Rows(NamedTuple):
    """Loads blocks of rows."""

    blocks: Sequence[_Part]
    names: list[str]
    delimiter: str
    types: Mapping[str, Any]

    def __call__(self, number: int) -> Any:
        import pyarrow
        from pyarrow import csv

        try:
            return csv.read_csv(
                pyarrow.BufferReader(self.blocks[number].read()),
                csv.ReadOptions(column_names=self.names, use_threads=False),
                csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                csv.ConvertOptions(column_types=self.types),
            )
        except pyarrow.ArrowInvalid as error:
            if "conversion error" in str(error):
                error.add_note("Name the type of that column: from_csv(..., types={...}).")
            raise

    def where(self, number: int) -> str:
        return self.blocks[number].where


class _Header(NamedTuple):
    names: list[str]
    size: int


def _header(path: str, delimiter: str) -> _Header:
    from pyarrow import csv

    with open(path, "rb") as file:
        line = file.readline()
    if not line.strip():
        raise DefinitionError(f"from_csv: {path} has no names of columns in its first line.")
    table = csv.read_csv(io.BytesIO(line), parse_options=csv.ParseOptions(delimiter=delimiter))
    names = list(table.column_names)
    if len(set(names)) < len(names):
        raise DefinitionError(
            f"from_csv: the names of the columns must be distinct; found {names} in {path}."
        )
    return _Header(names, len(line))


def _type(arrow: Any, name: str, kind: Any) -> Any:
    try:
        return arrow.type_for_alias(kind) if isinstance(kind, str) else arrow.field(name, kind).type
    except (ValueError, TypeError) as error:
        raise DefinitionError(
            f"from_csv: types must be types of Arrow or their names; got {kind!r} for {name!r}."
        ) from error


def _listed(paths: Paths, needed_by: str) -> list[str]:
    listed: Any = paths if isinstance(paths, list | tuple) else [paths]
    found = [os.path.abspath(os.fspath(path)) for path in listed]
    for path in found:
        if not os.path.isfile(path):
            raise missing(needed_by, path)
        _check_is_text(needed_by, path)
    return found


_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    **{b"BZh%d1AY" % level: "bzip2" for level in range(1, 10)},
}


def _check_is_text(needed_by: str, path: str) -> None:
    with open(path, "rb") as file:
        start = file.read(max(map(len, _COMPRESSED)))
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise DefinitionError(
                f"{needed_by}: files must not be compressed, because a resumed run goes on in the "
                f"middle of one; found {kind} in {path}. Decompress it first, or use from_iterable "
                f"with a function that opens it, such as lambda: gzip.open(path, 'rt')."
            )


def _split(path: str, records: Callable[[bytes], int], start: int = 0) -> Iterator[_Part]:
    """The blocks of a file, from byte `start` on."""
    with open(path, "rb") as file:
        file.seek(start)
        while data := file.read(_BLOCK_BYTES):
            if not data.endswith(b"\n"):
                data += file.readline()
            if number := records(data):
                yield _Part(path, start, len(data), number)
            start += len(data)


def _lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n"))


def _filled(data: bytes) -> int:
    return sum(1 for line in data.split(b"\n") if line.strip(b"\r"))
