"""The node of a tree that stands for a library's value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobrunner.checkpoint.encoding.libraries.table import (
    LibraryType,
    NotExactError,
    find_type,
    type_named,
)
from jobrunner.errors import CheckpointError, DefinitionError, JobRunnerError

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.dtypes import Trail, Tree
    from jobrunner.checkpoint.encoding.encode import Encoder


@dataclass(frozen=True, slots=True, eq=False)
class LibraryParts:
    """Stands for a library's value in an outline, or if it is read lazily without the library."""

    of: str  # full name of its class
    parts: Any

    def __repr__(self) -> str:
        return f"{self.of}({self.parts!r})"


def library_parts(value: Any) -> LibraryParts | None:
    """Return what a library's value is made of; None if it is not one, or not exact."""
    kind = find_type(value)
    try:
        return None if kind is None else LibraryParts(kind.name, kind.encode(value))
    except Exception:
        return None


def encode_value(encoder: Encoder, value: Any, trail: Trail, kind: LibraryType) -> Tree:
    """Encode a value that `find_type` knows; raises `NotExactError`."""
    try:
        parts = kind.encode(value)
    except NotExactError:
        raise
    except Exception as error:
        raise NotExactError(f"reading it raised {type(error).__name__}: {error}") from error
    if same := (
        encoder.mutable(value, trail)
        if kind.is_mutable
        else encoder.number(id(value), value, trail)
    ):
        return same
    before, encoder.is_value = encoder.is_value, encoder.is_value or kind.hides_memory()
    tree = encoder.within(kind.name, value, parts, trail)
    encoder.is_value = before
    encoder.formats.append(4)
    return {"$": "library", "of": kind.name, "value": tree}


def decode_value(decoder: Any, of: str, value: Any) -> Any:
    """Decode what `encode_value` returned; what it names is looked up in the table of this version."""
    kind = type_named(of)
    if kind is None:
        raise DefinitionError(
            f"{decoder.where} contains {of}, which this version of jobrunner cannot read. Read it "
            f"with the version that wrote it, or a later one."
        )
    if decoder.is_outline:
        return LibraryParts(of, decoder.decode(value))
    parts = decoder.whole(value)
    try:
        if decoder.lacks_library:
            return LibraryParts(of, parts)
        return kind.decode(parts)
    except ImportError as error:
        if decoder.is_lazy:
            decoder.lacks_library = True  # also to make what this is a part of
            return LibraryParts(of, parts)
        missing = (error.name or kind.library).partition(".")[0]
        raise DefinitionError(
            f"{decoder.where} contains {of}, but {missing} cannot be imported ({error}). Install it "
            f"(pip install {missing}). Its arrays can be read without it: "
            f"manager.open(epoch)[node][blob].parts."
        ) from error
    except JobRunnerError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{decoder.where} is whole, but {kind.library} cannot make {of} of it: "
            f"{type(error).__name__}: {error}. Read it with the version of {kind.library} that saved "
            f"it, or a later one."
        ) from error
