"""One node at one epoch, on disk.

To disk: `layout.py` plans the files of encoded blobs, `chunks.py` cuts arrays and makes bytes of the
pieces, `array_document.py` and `document.py` describe them, `store_writer.py` writes all of it.
Back: `store_reader.py` reads the root document and asks `array_reader.py`, or `history_reader.py`,
for arrays, which read through `damage.py`: it compares each file with its digest. `lazy.py` lets Zarr
read an array in the same way, chunk by chunk.
"""

from jobrunner.checkpoint.store.array_document import GROUP, describe_array
from jobrunner.checkpoint.store.chunks import Grid
from jobrunner.checkpoint.store.document import (
    DOCUMENT_MOST_BYTES,
    STORE_FORMAT,
    RecordEntry,
    StoreDocument,
    StoreEntry,
    is_sealed,
)
from jobrunner.checkpoint.store.history_reader import (
    HistoryMark,
    HistoryReader,
    chain_of,
    history_root,
    name_chunk,
)
from jobrunner.checkpoint.store.layout import lay_out
from jobrunner.checkpoint.store.store_reader import (
    ArrayOutline,
    StoredValue,
    StoreReader,
    verify_stores,
)
from jobrunner.checkpoint.store.store_writer import (
    NO_STORE,
    Former,
    StoreWriter,
    digest_blob,
    write_stores,
)
