"""Records for tasks: readers with a position that is saved. Libraries are imported when used."""

from jobrunner.data.arrow_files import from_arrow
from jobrunner.data.dask_parts import from_dask
from jobrunner.data.reader import DataReader, Reader
from jobrunner.data.rows import from_records
from jobrunner.data.stateful_loader import from_loader
from jobrunner.data.stream import from_iterable
from jobrunner.errors import EndOfData
