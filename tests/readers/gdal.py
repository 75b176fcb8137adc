"""Prints, as JSON, the arrays of a store that GDAL reads: python gdal.py LIBRARY STORE PATH...

GDAL has no wheels with Python bindings, but those of pyogrio contain the library.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from typing import Any

import numpy as np

POINTER, SIZE = c.c_void_p, c.c_size_t
MULTIDIMENSIONAL = 0x10
DTYPES = {"byte": "uint8", "cfloat32": "complex64", "cfloat64": "complex128"}
"""Those whose name is not that of GDAL in lower case."""

_library = c.CDLL(sys.argv[1])


def call(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_library, name)
    function.restype = result
    return function(*arguments)


def read(store: str, path: str) -> Any:
    call("CPLErrorReset", None)
    dataset = call("GDALOpenEx", POINTER, store.encode(), MULTIDIMENSIONAL, None, None, None)
    group = POINTER(call("GDALDatasetGetRootGroup", POINTER, POINTER(dataset)))
    name = f"/{path}".encode()
    array = POINTER(call("GDALGroupOpenMDArrayFromFullname", POINTER, group, name, None))
    if not array:
        return call("CPLGetLastErrorMsg", c.c_char_p).decode()
    count = SIZE()
    axes = call("GDALMDArrayGetDimensions", c.POINTER(POINTER), array, c.byref(count))
    shape = [call("GDALDimensionGetSize", c.c_uint64, POINTER(axes[i])) for i in range(count.value)]
    kind = POINTER(call("GDALMDArrayGetDataType", POINTER, array))
    number = call("GDALExtendedDataTypeGetNumericDataType", c.c_int, kind)
    dtype = call("GDALGetDataTypeName", c.c_char_p, number).decode().lower()
    found = np.zeros(shape, DTYPES.get(dtype, dtype))
    starts, counts = (c.c_uint64 * 9)(), (SIZE * 9)(*shape)
    memory = POINTER(found.ctypes.data)
    where = (array, starts, counts, None, None, kind, memory, None, SIZE(0))
    if not call("GDALMDArrayRead", c.c_int, *where):
        return call("CPLGetLastErrorMsg", c.c_char_p).decode()
    if found.dtype.kind == "c":
        found = np.stack([found.real, found.imag], -1)
    return found.tolist()


if __name__ == "__main__":
    call("GDALAllRegister", None)
    call("CPLPushErrorHandler", None, c.cast(_library.CPLQuietErrorHandler, POINTER))
    print(json.dumps({path: read(sys.argv[2], path) for path in sys.argv[3:]}))
