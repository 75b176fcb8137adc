"""Values to JSON trees and arrays, and back. Pure: no I/O.

`encoded_blobs.py` encodes the blobs of a node, each by an `Encoder` (`encode.py`, which lists the kinds
of trees); `decode.py` has the way back. Values that are no plain ones have a codec: those of Python are
in `everyday.py`, of NumPy in `numpy_types.py`, of other packages in `libraries/`; named tuples and
dataclasses are in `job_classes.py`, objects with a ``state_dict()`` in `stateful.py`. `dtypes.py` has
what dtypes are in JSON and in Zarr, `unmade.py` what stands for values that are not made.
"""

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
