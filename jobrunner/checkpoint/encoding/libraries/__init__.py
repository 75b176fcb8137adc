"""Which types of other libraries are saved: PyTorch, SciPy, pandas, xarray, JAX.

Imports none of them until a value is decoded. A checkpoint names a type; the name is looked up here,
so that it can choose only among these. Another thread may just be importing a library: then its
module is there, but some of its names are not yet, and no value can be of the types that lack.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from jobrunner.checkpoint.encoding.libraries.torch import check_device as check_device


@dataclass(frozen=True, slots=True)
class LibraryType:
    """A public class of a library, and the private subclasses that stand for it."""

    module: str
    attribute: str
    codec: str
    """The module of this package that encodes and decodes it."""
    is_mutable: bool = True
    hides_memory: bool = False
    """Whether a change of it never shows in what shares its memory, nor the other way round."""

    keeps_states: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its name in checkpoints."""
        return f"{self.module}.{self.attribute}"

    @property
    def library(self) -> str:
        """What to import and to install."""
        return self.module.partition(".")[0]

    def encode(self, value: Any) -> Any:
        """Return what a value is made of; raises what the library raises."""
        return self._import_codec().encode(self.name, value)

    def decode(self, parts: Any) -> Any:
        """Make the value again; raises ImportError, or what the library raises for wrong parts."""
        importlib.import_module(self.module)
        return self._import_codec().decode(self.name, parts)

    def _import_codec(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.codec}")

    def has_subclass(self, cls: type) -> bool:
        """Whether it is the base of a class."""
        base = getattr(sys.modules.get(self.module), self.attribute, None)
        return isinstance(base, type) and issubclass(cls, base)


def _types(codec: str, module: str, names: str, **options: bool) -> list[LibraryType]:
    return [LibraryType(module, name, codec, **options) for name in names.split()]


def _constant(codec: str, module: str, names: str) -> list[LibraryType]:
    return _types(codec, module, names, is_mutable=False, hides_memory=True)


LIBRARY_TYPES = (
    *_types("torch", "torch", "Tensor"),
    *_types("sparse", "scipy.sparse", "sparray spmatrix"),
    *_types("pandas", "pandas", "DataFrame Series", hides_memory=True),  # it copies on write
    *_constant("pandas", "pandas", "Index Timestamp Timedelta"),
    *_constant("pandas", "pandas.api.typing", "NAType NaTType"),
    *_types("pandas", "pandas.api.extensions", "ExtensionArray"),
    *_types("xarray", "xarray", "Dataset DataArray Variable"),
    *_constant("jax", "jax", "Array"),
)
_BY_NAME = {kind.name: kind for kind in LIBRARY_TYPES}
_DEFINING = {"jaxlib": "jax"}
"""Packages that define the classes of another library's values."""


def type_of(cls: type) -> LibraryType | None:
    """Find the type of values of a class that the library itself defines; not of users' subclasses."""
    package = str(cls.__module__).partition(".")[0]
    library = _DEFINING.get(package, package)
    for kind in LIBRARY_TYPES:
        if kind.library == library and kind.has_subclass(cls):
            return kind
    return None


def type_named(name: str) -> LibraryType | None:
    """Return the type that a checkpoint names."""
    return _BY_NAME.get(name)
