"""Readers of Arrow data sets, by row group or file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobrunner.data.reader import DataReader
from jobrunner.data.record_reader import RecordReader
from jobrunner.data.rows import Blocks, is_of
from jobrunner.define import checked
from jobrunner.errors import DefinitionError


@checked
def from_arrow(dataset: Any, *, columns: Sequence[str] | None = None) -> DataReader:
    """A reader of the rows of an Arrow data set; a batch is an Arrow table, a single row a dict.

    Parameters
    ----------
    dataset : pyarrow.dataset.Dataset
        Of files of any format that pyarrow reads (Parquet, CSV, JSON, ORC, Feather), on any file
        system that it reads; files are taken in the order of their paths.
    columns : sequence of str, optional
        Read only these.

    Raises
    ------
    DefinitionError
        If it is no data set.

    Notes
    -----
    Of Parquet, one row group at a time is read; of other formats, one file. The rows of a format
    that does not count them (CSV, JSON) are counted when the reader is made: the files are read once
    then.
    """
    if not (is_of(dataset, "pyarrow") and hasattr(dataset, "get_fragments")):
        raise DefinitionError(
            f"from_arrow: dataset must be a pyarrow.dataset.Dataset; got {dataset!r:.200}. Of files, "
            f"pyarrow.dataset.dataset(paths, format='parquet') makes one (pip install "
            f"'dask-jobrunner[arrow]'); for a table use from_records."
        )
    schema, names = dataset.schema, columns and list(columns)
    fragments, lengths = [], []
    for file in sorted(dataset.get_fragments(), key=_path_of):
        if not hasattr(file, "split_by_row_group"):
            fragments.append(file)
            lengths.append(file.count_rows())
            continue
        for group in file.split_by_row_group():
            fragments.append(group)
            lengths.append(sum(part.num_rows for part in group.row_groups))

    def load(number: int) -> Any:
        return fragments[number].to_table(schema=schema, columns=names, use_threads=False)

    def describe(number: int) -> str:
        return _path_of(fragments[number])

    return RecordReader(Blocks(lengths, load, describe))


def _path_of(fragment: Any) -> str:
    return getattr(fragment, "path", "a fragment in memory")
