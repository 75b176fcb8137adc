"""Values to JSON trees and arrays, and back. Pure: no I/O."""

from jobrunner.checkpoint.encoding.classes import (
    check_classes,
    find_class,
    find_classes,
    sent_as,
)
from jobrunner.checkpoint.encoding.codecs import (
    REGISTERED_CODECS,
    Codec,
    CodecTable,
    register_codec,
)
from jobrunner.checkpoint.encoding.decode import Decoder, InvalidTreeError
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    ArrayPart,
    CoreType,
    Spec,
    UnsupportedDtypeError,
    core_type,
    dtype_from_spec,
    dtype_to_spec,
    without_padding,
)
from jobrunner.checkpoint.encoding.libraries import LibraryParts, library_parts
from jobrunner.checkpoint.encoding.node import (
    EncodedBlob,
    check_dimensions,
    encode_blobs,
    join_refusals,
    refuse_classes,
    with_options,
)
from jobrunner.checkpoint.encoding.outline import SavedObject, ValueOutline
from jobrunner.checkpoint.encoding.schema import (
    Count,
    Document,
    EpochJson,
    EpochKey,
    Length,
    Shape,
    convert,
    described,
    parse,
    read_document,
)
from jobrunner.checkpoint.encoding.stateful import StatefulBlob, given_state, join_states
