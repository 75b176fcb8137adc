"""Which types of other libraries are saved. Imports none of them until a value is decoded.

A checkpoint names a type. The name is looked up here, so that it can choose only among these.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class NotExactError(TypeError):
    """A value that would not come back as it is; the message says why, and what to save instead."""


@dataclass(frozen=True, slots=True)
class LibraryType:
    """A public class of a library, and the private subclasses that stand for it."""

    module: str
    attribute: str
    codec: str
    """The module beside this one that encodes and decodes it."""
    is_mutable: bool = True
    copies_on_write: bool = False

    @property
    def name(self) -> str:
        """Its name in checkpoints."""
        return f"{self.module}.{self.attribute}"

    @property
    def library(self) -> str:
        """What to import and to install."""
        return self.module.partition(".")[0]

    def hides_memory(self) -> bool:
        """Whether a change of it never shows in what shares its memory, nor the other way round."""
        if self.copies_on_write and self.library == "pandas":
            pandas = sys.modules["pandas"]
            is_old = int(pandas.__version__.partition(".")[0]) < 3
            return not is_old or pandas.options.mode.copy_on_write is True
        return not self.is_mutable

    def encode(self, value: Any) -> Any:
        """Convert to arrays and plain values; raises `NotExactError`."""
        return self._codec().encode(self.name, value)

    def decode(self, parts: Any) -> Any:
        """Make the value again; raises ImportError, or what the library raises for wrong parts."""
        importlib.import_module(self.module)
        return self._codec().decode(self.name, parts)

    def _codec(self) -> Any:
        return importlib.import_module(f"{__package__}.{self.codec}")

    def _is_type_of(self, value: object) -> bool:
        base = getattr(sys.modules.get(self.module), self.attribute, None)
        return base is not None and isinstance(value, base)


_TYPES: Sequence[LibraryType] = [
    LibraryType("scipy.sparse", "sparray", "sparse"),
    LibraryType("scipy.sparse", "spmatrix", "sparse"),
    LibraryType("pandas", "DataFrame", "frames", copies_on_write=True),
    LibraryType("pandas", "Series", "frames", copies_on_write=True),
    LibraryType("pandas", "Index", "frames", is_mutable=False),
    LibraryType("pandas.api.extensions", "ExtensionArray", "frames"),
    LibraryType("pandas", "Timestamp", "frames", is_mutable=False),
    LibraryType("pandas", "Timedelta", "frames", is_mutable=False),
    LibraryType("pandas", "Period", "frames", is_mutable=False),
    LibraryType("pandas", "Interval", "frames", is_mutable=False),
    LibraryType("pandas.api.typing", "NAType", "frames", is_mutable=False),
    LibraryType("pandas.api.typing", "NaTType", "frames", is_mutable=False),
    LibraryType("pyarrow", "Table", "arrow", is_mutable=False),
    LibraryType("pyarrow", "RecordBatch", "arrow", is_mutable=False),
    LibraryType("pyarrow", "Array", "arrow", is_mutable=False),
    LibraryType("pyarrow", "ChunkedArray", "arrow", is_mutable=False),
    LibraryType("pyarrow", "Schema", "arrow", is_mutable=False),
    LibraryType("pyarrow", "DataType", "arrow", is_mutable=False),
    LibraryType("xarray", "Dataset", "labeled"),
    LibraryType("xarray", "DataArray", "labeled"),
    LibraryType("xarray", "DataTree", "labeled"),
    LibraryType("xarray", "Variable", "labeled"),
    LibraryType("jax", "Array", "jax", is_mutable=False),
]
_BY_NAME = {it.name: it for it in _TYPES}
_BY_PACKAGE: dict[str, list[LibraryType]] = {}
for _type in _TYPES:
    _BY_PACKAGE.setdefault(_type.library, []).append(_type)
_BY_PACKAGE["jaxlib"] = _BY_PACKAGE.get("jax", [])  # where the class of JAX's arrays lies


def find_type(value: object) -> LibraryType | None:
    """Find the type of a value whose class the library itself defines; not of users' subclasses."""
    package = str(type(value).__module__).partition(".")[0]
    return next((it for it in _BY_PACKAGE.get(package, ()) if it._is_type_of(value)), None)


def type_named(name: str) -> LibraryType | None:
    """Return the type that a checkpoint names."""
    return _BY_NAME.get(name)
