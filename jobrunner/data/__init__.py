"""Records for tasks: readers with a position that is saved. Libraries are imported when used."""

from jobrunner.data.arrow import from_arrow, from_parquet
from jobrunner.data.files import from_csv, from_lines
from jobrunner.data.loader import from_loader
from jobrunner.data.partitions import from_dask
from jobrunner.data.reader import DataReader, Reader
from jobrunner.data.records import from_records
from jobrunner.data.stream import from_iterable
from jobrunner.errors import EndOfData
