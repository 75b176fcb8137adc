"""One node at one epoch, on disk."""

from jobrunner.checkpoint.store.array_document import GROUP, describe_array
from jobrunner.checkpoint.store.chunks import Grid
from jobrunner.checkpoint.store.document import (
    DOCUMENT_MOST_BYTES,
    RecordEntry,
    StoreDocument,
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
