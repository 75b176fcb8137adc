"""Values to JSON trees and arrays, and back. Pure: no I/O."""

from jobrunner.checkpoint.encoding.codecs import (
    REGISTERED_CODECS,
    Codec,
    CodecTable,
    InvalidTreeError,
    register_codec,
)
from jobrunner.checkpoint.encoding.decode import LONE_ARRAY, Decoder, whole_tree
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    ArrayPart,
    CoreType,
    Spec,
    Tree,
    UnsupportedDtypeError,
    core_type,
    dtype_from_spec,
    dtype_to_spec,
    without_padding,
)
from jobrunner.checkpoint.encoding.encoded_blobs import (
    EncodedBlob,
    check_dimensions,
    check_part,
    encode_blobs,
    with_options,
)
from jobrunner.checkpoint.encoding.job_classes import (
    find_classes,
)
from jobrunner.checkpoint.encoding.stateful import StatefulBlob, join_states
from jobrunner.checkpoint.encoding.unmade import Unmade, show_outline
