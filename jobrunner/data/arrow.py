"""Readers of Parquet files and Arrow data sets, by row group or file."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

from jobrunner.data.blocks import Blocks
from jobrunner.data.indexed import Indexed
from jobrunner.data.reader import DataReader, reader_of
from jobrunner.define import NAMES, PATH, Rule, checked
from jobrunner.errors import DefinitionError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def _are_paths(paths: object) -> bool:
    if isinstance(paths, list | tuple):
        return len(paths) > 0 and all(map(PATH.fits, paths))
    return PATH.fits(paths)


PATHS = Rule("a path (str or os.PathLike), or a list of paths", _are_paths)


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


@checked(paths=PATHS, columns=NAMES)
def from_parquet(paths: Paths, *, columns: Sequence[str] | None = None) -> DataReader:
    """A reader of the rows of Parquet files; a batch is an Arrow table, a single row a dict.

    Parameters
    ----------
    paths : path or list of paths
        Files, or a directory of files, as for `pyarrow.dataset.dataset`.
    columns : sequence of str, optional
        Read only these.

    Raises
    ------
    DefinitionError
        If there is no such column, or pyarrow is not installed.
    OSError
        If a file cannot be read.

    Notes
    -----
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
    return from_arrow(dataset, columns=columns)


@checked(columns=NAMES)
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
    names = dataset.schema.names if columns is None else list(columns)
    if unknown := sorted(set(names) - set(dataset.schema.names)):
        raise DefinitionError(
            f"columns must name columns of the data; found {unknown}, expected some of "
            f"{dataset.schema.names}."
        )
    whole = sorted(dataset.get_fragments(), key=lambda it: getattr(it, "path", ""))
    fragments, lengths = [], []
    for fragment in whole:
        if isinstance(fragment, arrow.dataset.ParquetFileFragment):
            for part in fragment.split_by_row_group():
                fragments.append(part)
                lengths.append(sum(group.num_rows for group in part.row_groups))
        else:
            fragments.append(fragment)
            lengths.append(fragment.count_rows())
    return reader_of(Indexed, Blocks(lengths, _Fragments(fragments, dataset.schema, names)))


class _Fragments(NamedTuple):
    """Loads blocks of rows."""

    fragments: Sequence[Any]
    schema: Any
    names: Sequence[str]

    def __call__(self, number: int) -> Any:
        from pyarrow import dataset, fs, parquet

        fragment = self.fragments[number]
        if (
            isinstance(fragment, dataset.ParquetFileFragment)
            and fragment.format == dataset.ParquetFileFormat()
            and fragment.physical_schema.equals(self.schema, check_metadata=True)
        ):  # The same, without the 0.3 ms that a scan takes to begin.
            group = fragment.row_groups[0].id
            is_far = not isinstance(fragment.filesystem, fs.LocalFileSystem)
            with fragment.open() as source:
                file = parquet.ParquetFile(source, metadata=fragment.metadata, pre_buffer=is_far)
                return file.read_row_group(group, self.names, use_threads=False).select(self.names)
        return fragment.to_table(schema=self.schema, columns=self.names, use_threads=False)

    def where(self, number: int) -> str:
        fragment = self.fragments[number]
        groups = [each.id for each in getattr(fragment, "row_groups", ())]
        named = f", row group {groups[0]}" if groups else ""
        return f"{getattr(fragment, 'path', 'a fragment')}{named}"
