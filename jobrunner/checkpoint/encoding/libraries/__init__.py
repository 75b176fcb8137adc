"""Values of SciPy, pandas, pyarrow, xarray, JAX and PyTorch as arrays and plain values, and back."""

from jobrunner.checkpoint.encoding.libraries.node import (
    LibraryParts,
    decode_value,
    encode_value,
    library_parts,
)
from jobrunner.checkpoint.encoding.libraries.table import NotExactError, find_type
from jobrunner.checkpoint.encoding.libraries.tensors import (
    UnsupportedTensorError,
    decode_tensor,
    encode_tensor,
    is_tensor,
)
