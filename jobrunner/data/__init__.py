"""Records for tasks: readers with a position that is saved. No Dask, until it is read from."""

from jobrunner.data.indexed import IndexedReader, from_records
from jobrunner.data.limit import LimitedReader
from jobrunner.data.protocol import Reader
from jobrunner.errors import EndOfData
