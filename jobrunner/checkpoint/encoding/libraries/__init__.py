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

    name: str
    """Its module and name, and so its name in checkpoints."""
    is_mutable: bool = True
    hides_memory: bool = False
    """Whether a change of it never shows in what shares its memory, nor the other way round."""

    keeps_states: ClassVar[bool] = False

    @property
    def library(self) -> str:
        """What to import and to install; the module of this package for its types has its name."""
        return self.name.partition(".")[0]

    def encode(self, value: Any) -> Any:
        """Return what a value is made of; raises what the library raises."""
        return self._import_codec().encode(self.name, value)

    def decode(self, parts: Any) -> Any:
        """Make the value again; raises ImportError, or what the library raises for wrong parts."""
        importlib.import_module(self.name.rpartition(".")[0])
        return self._import_codec().decode(self.name, parts)

    def _import_codec(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.library}")

    def has_subclass(self, cls: type) -> bool:
        """Whether it is the base of a class."""
        module, _, attribute = self.name.rpartition(".")
        base = getattr(sys.modules.get(module), attribute, None)
        return isinstance(base, type) and issubclass(cls, base)


def _constant(name: str) -> LibraryType:
    return LibraryType(name, is_mutable=False, hides_memory=True)


LIBRARY_TYPES = (
    LibraryType("torch.Tensor"),
    LibraryType("scipy.sparse.sparray"),
    LibraryType("scipy.sparse.spmatrix"),
    # They copy on write.
    LibraryType("pandas.DataFrame", hides_memory=True),
    LibraryType("pandas.Series", hides_memory=True),
    _constant("pandas.Index"),
    _constant("pandas.Timestamp"),
    _constant("pandas.Timedelta"),
    _constant("pandas.api.typing.NAType"),
    _constant("pandas.api.typing.NaTType"),
    LibraryType("pandas.api.extensions.ExtensionArray"),
    LibraryType("xarray.Dataset"),
    LibraryType("xarray.DataArray"),
    _constant("jax.Array"),
)
BY_NAME = {kind.name: kind for kind in LIBRARY_TYPES}


def type_of(cls: type) -> LibraryType | None:
    """Find the type of values of a class that the library itself defines; not of users' subclasses."""
    library = str(cls.__module__).partition(".")[0].removesuffix("lib")  # jaxlib defines JAX's
    for kind in LIBRARY_TYPES:
        if kind.library == library and kind.has_subclass(cls):
            return kind
    return None
