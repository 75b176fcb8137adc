"""Records for tasks: readers with a position that is saved. Libraries are imported when used."""

from jobrunner.data.arrow import from_arrow, from_parquet
from jobrunner.data.files import from_csv, from_lines
from jobrunner.data.indexed import IndexedReader
from jobrunner.data.loader import LoaderReader, from_loader
from jobrunner.data.partitions import from_dask
from jobrunner.data.prefetch import PrefetchedReader
from jobrunner.data.protocol import LimitedReader, Reader
from jobrunner.data.records import from_records
from jobrunner.data.stream import StreamReader, from_iterable
from jobrunner.errors import EndOfData
