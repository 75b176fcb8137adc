"""Readers of Parquet files and Arrow data sets, by row group or file."""

from __future__ import annotations

import errno
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any

from jobrunner.data.blocks import Blocks
from jobrunner.data.indexed import Indexed
from jobrunner.data.reader import DataReader, reader_of
from jobrunner.define import PATH, Rule, checked
from jobrunner.errors import DefinitionError


def _are_paths(paths: object) -> bool:
    if isinstance(paths, list | tuple):
        return len(paths) > 0 and all(map(PATH.fits, paths))
    return PATH.fits(paths)


Paths = Annotated[
    str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    Rule("a path (str or os.PathLike), or a list of paths", _are_paths),
]


def import_arrow(needed_by: str) -> Any:
    """The package pyarrow; raises `DefinitionError` if it is not installed."""
    try:
        import pyarrow
        import pyarrow.dataset
    except ImportError:
        raise DefinitionError(
            f"{needed_by} needs pyarrow, which is not installed: pip install 'dask-jobrunner[arrow]'."
        ) from None
    return pyarrow


def missing(needed_by: str, path: str) -> FileNotFoundError:
    """The error of a reader whose file does not exist."""
    return FileNotFoundError(
        errno.ENOENT,
        f"{needed_by}: paths must be files that the worker can open; on {platform.node()} there is "
        f"no file",
        path,
    )


@checked
def from_parquet(paths: Paths, *, columns: Sequence[str] | None = None) -> DataReader:
    """A reader of the rows of Parquet files; a batch is an Arrow table, a single row a dict.

    Parameters
    ----------
    paths : path or list of paths
        Files, read in this order, or a directory of files, read in the order of their paths.
    columns : sequence of str, optional
        Read only these.

    Raises
    ------
    DefinitionError
        If there is no such column, the files have other columns, or columns of types that Arrow
        cannot promote to one, or pyarrow is not installed.
    OSError
        If a file cannot be read.

    Notes
    -----
    For files of different columns, use `from_arrow` with a data set whose schema names them all.
    One row group at a time is read. A shuffled reader takes the row groups in a shuffled order, and
    the rows of each. Only the files' footers are read when the reader is made.
    """
    arrow = import_arrow("from_parquet")
    where: Any = paths
    where = [os.fspath(it) for it in where] if isinstance(where, list | tuple) else os.fspath(where)
    try:
        dataset = arrow.dataset.dataset(where, format="parquet")
    except FileNotFoundError as error:
        raise missing("from_parquet", str(error)) from None
    _check_columns(dataset, columns)
    fragments = list(dataset.get_fragments())
    dataset = dataset.replace_schema(_promoted(arrow, dataset.schema, fragments, columns))
    if isinstance(where, str):
        fragments.sort(key=_path_of)
    return _reader(arrow, dataset, columns, fragments)


@checked
def from_arrow(dataset: Any, *, columns: Sequence[str] | None = None) -> DataReader:
    """A reader of the rows of an Arrow data set; a batch is an Arrow table, a single row a dict.

    Parameters
    ----------
    dataset : pyarrow.dataset.Dataset
        Of files of any format that pyarrow reads; files are taken in the order of their paths.
    columns : sequence of str, optional
        Read only these.

    Raises
    ------
    DefinitionError
        If it is no data set, there is no such column, or pyarrow is not installed.

    Notes
    -----
    Of Parquet, one row group at a time is read; of other formats, one file. The rows of a format
    that does not count them (CSV, JSON) are counted when the reader is made: the files are read once
    then.
    """
    arrow = import_arrow("from_arrow")
    if not isinstance(dataset, arrow.dataset.Dataset):
        raise DefinitionError(
            f"from_arrow: dataset must be a pyarrow.dataset.Dataset; got {dataset!r:.200}. For a "
            f"table use from_records, for Parquet files from_parquet."
        )
    _check_columns(dataset, columns)
    return _reader(arrow, dataset, columns, sorted(dataset.get_fragments(), key=_path_of))


def _path_of(fragment: Any) -> str:
    path: str = getattr(fragment, "path", "")
    return path


def _check_columns(dataset: Any, columns: Sequence[str] | None) -> None:
    if unknown := sorted(set(columns or ()) - set(dataset.schema.names)):
        raise DefinitionError(
            f"columns must name columns of the data; found {unknown}, expected some of "
            f"{dataset.schema.names}."
        )


def _promoted(
    arrow: Any, schema: Any, fragments: Sequence[Any], columns: Sequence[str] | None
) -> Any:
    """The schema of the first file, with types that hold those of all; only `columns` must agree."""
    promoted, names = schema, sorted({*(schema.names if columns is None else columns)})
    for fragment in fragments:
        its = fragment.physical_schema
        if its.equals(schema):
            continue
        found = sorted({*its.names} if columns is None else {*its.names} & {*names})
        if found != names:
            raise DefinitionError(
                f"from_parquet: all files must have the same columns; expected {names} as in "
                f"{_path_of(fragments[0])}, found {found} in {_path_of(fragment)}. Name some that all "
                f"have (columns=), or use from_arrow with a data set whose schema names all."
            )
        for name in names:
            at = promoted.get_field_index(name)
            try:
                both = [arrow.schema([each.field(name)]) for each in (promoted, its)]
                field = arrow.unify_schemas(both, promote_options="permissive").field(0)
            except arrow.ArrowException as error:
                raise DefinitionError(
                    f"from_parquet: column {name!r} must have types that Arrow can promote to one; "
                    f"expected {promoted.field(at).type} as in files before, found "
                    f"{its.field(name).type} in {_path_of(fragment)}."
                ) from error
            if field != promoted.field(at):
                promoted = promoted.set(at, field)
    return promoted


def _reader(
    arrow: Any, dataset: Any, columns: Sequence[str] | None, whole: Sequence[Any]
) -> DataReader:
    names = dataset.schema.names if columns is None else list(columns)
    paths = [_path_of(each) for each in whole]
    order = "" if paths == sorted(paths) else "files as listed"
    fragments, lengths = [], []
    for fragment in whole:
        if isinstance(fragment, arrow.dataset.ParquetFileFragment):
            for part in fragment.split_by_row_group():
                fragments.append(part)
                lengths.append(sum(group.num_rows for group in part.row_groups))
        else:
            fragments.append(fragment)
            lengths.append(fragment.count_rows())
    load = _Fragments(fragments, lengths, dataset.schema, names)
    return reader_of(Indexed, Blocks(lengths, load, order))


class _Fragments:
    """Loads blocks of rows."""

    def __init__(
        self, fragments: Sequence[Any], lengths: Sequence[int], schema: Any, names: Sequence[str]
    ) -> None:
        self._fragments, self._lengths = fragments, lengths
        self._schema, self._names = schema, names
        self._lock = threading.Lock()
        self._next = -1  # what follows the block loaded last
        self._following: Iterator[Any] | None = None  # reads it, and those that follow in its file

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Fragments, (self._fragments, self._lengths, self._schema, self._names))

    def __call__(self, number: int) -> Any:
        with self._lock:
            is_next, groups = number == self._next, self._following
            self._following = None  # another thread that loads must not use it meanwhile
        table = next(groups, None) if groups and is_next else None
        if table is None or table.num_rows != self._lengths[number]:
            table, groups = self._load(number, is_next)
        with self._lock:
            self._next, self._following = number + 1, groups
        return table

    def _load(self, number: int, is_next: bool) -> tuple[Any, Iterator[Any] | None]:
        """A block, and what reads those that follow if they are likely to be asked for."""
        fragment = self._fragments[number]
        if not self._is_read_by_group(fragment):
            table = fragment.to_table(schema=self._schema, columns=self._names, use_threads=False)
            return table, None
        groups = self._groups(number) if is_next else None
        table = next(groups, None) if groups else None
        if table is not None and table.num_rows == self._lengths[number]:
            return table, groups
        with fragment.open() as source:
            group = fragment.row_groups[0].id
            table = _file(fragment, source).read_row_group(group, self._names, use_threads=False)
            return table.select(self._names), None

    def _is_read_by_group(self, fragment: Any) -> bool:
        """Whether Arrow's reader of files finds what a scan does, which takes 0.3 ms to begin."""
        from pyarrow import dataset

        return bool(
            isinstance(fragment, dataset.ParquetFileFragment)
            and fragment.format == dataset.ParquetFileFormat()
            and fragment.physical_schema.equals(self._schema, check_metadata=True)
        )

    def _groups(self, number: int) -> Iterator[Any]:
        """The row groups of a file from one on, while they have as many rows; also a smaller last one.

        It takes less to read many than one after another.
        """
        import pyarrow

        first, rows = self._fragments[number], self._lengths[number]
        group, stop = first.row_groups[0].id, first.metadata.num_row_groups
        following = self._lengths[number + 1 : number + stop - group]
        equal = sum(1 for _ in takewhile(rows.__eq__, following))
        groups = range(group, group + 1 + equal + any(it < rows for it in following[equal:][:1]))
        with first.open() as source:
            batches = _file(first, source).iter_batches(
                rows, groups, self._names, use_threads=False
            )
            for batch in batches:
                table = pyarrow.Table.from_batches([batch])
                yield table if table.column_names == self._names else table.select(self._names)

    def where(self, number: int) -> str:
        fragment = self._fragments[number]
        groups = [each.id for each in getattr(fragment, "row_groups", ())]
        named = f", row group {groups[0]}" if groups else ""
        return f"{getattr(fragment, 'path', 'a fragment')}{named}"


def _file(fragment: Any, source: Any) -> Any:
    from pyarrow import fs, parquet

    is_far = not isinstance(fragment.filesystem, fs.LocalFileSystem)
    return parquet.ParquetFile(source, metadata=fragment.metadata, pre_buffer=is_far)
