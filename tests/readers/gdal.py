"""Prints, as JSON, the arrays of a store that GDAL reads: python gdal.py LIBRARY STORE PATH...

GDAL has no wheels with Python bindings, but those of pyogrio contain the library.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from typing import Any

import numpy as np

DTYPES = {
    "Byte": "u1",
    "Int8": "i1",
    "UInt16": "u2",
    "Int16": "i2",
    "UInt32": "u4",
    "Int32": "i4",
    "UInt64": "u8",
    "Int64": "i8",
    "Float16": "f2",
    "Float32": "f4",
    "Float64": "f8",
    "CFloat32": "c8",
    "CFloat64": "c16",
}
POINTER, SIZE = c.c_void_p, c.c_size_t


class Gdal:
    """The few functions of the C interface that are needed."""

    def __init__(self, library: str) -> None:
        self._library = c.CDLL(library)
        self.call("GDALAllRegister", None)
        quiet = c.cast(self._library.CPLQuietErrorHandler, POINTER)
        self.call("CPLPushErrorHandler", None, quiet)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function(*arguments)

    def read(self, store: str, path: str) -> Any:
        self.call("CPLErrorReset", None)
        multidimensional = 0x10
        dataset = self.call(
            "GDALOpenEx", POINTER, store.encode(), multidimensional, None, None, None
        )
        group = POINTER(self.call("GDALDatasetGetRootGroup", POINTER, POINTER(dataset)))
        name = f"/{path}".encode()
        array = self.call("GDALGroupOpenMDArrayFromFullname", POINTER, group, name, None)
        if not array:
            return self._refusal()
        count = SIZE()
        axes = self.call(
            "GDALMDArrayGetDimensions", c.POINTER(POINTER), POINTER(array), c.byref(count)
        )
        shape = [
            self.call("GDALDimensionGetSize", c.c_uint64, POINTER(axes[i]))
            for i in range(count.value)
        ]
        kind = POINTER(self.call("GDALMDArrayGetDataType", POINTER, POINTER(array)))
        number = self.call("GDALExtendedDataTypeGetNumericDataType", c.c_int, kind)
        dtype = DTYPES[self.call("GDALGetDataTypeName", c.c_char_p, number).decode()]
        found = np.zeros(shape, dtype)
        starts = (c.c_uint64 * max(1, len(shape)))()
        counts = (SIZE * max(1, len(shape)))(*shape)
        memory = POINTER(found.ctypes.data)
        done = self.call(
            "GDALMDArrayRead",
            *(c.c_int, POINTER(array), starts, counts, None, None, kind, memory, None, SIZE(0)),
        )
        if not done:
            return self._refusal()
        return (
            found[..., None].view(f"f{found.itemsize // 2}") if dtype[0] == "c" else found
        ).tolist()

    def _refusal(self) -> str:
        why: bytes = self.call("CPLGetLastErrorMsg", c.c_char_p)
        return why.decode()


if __name__ == "__main__":
    gdal = Gdal(sys.argv[1])
    print(json.dumps({path: gdal.read(sys.argv[2], path) for path in sys.argv[3:]}))
