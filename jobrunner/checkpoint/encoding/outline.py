"""Show what a tree stands for, without its arrays. Pure: no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jobrunner.checkpoint.encoding.decode import Decoder, InvalidTreeError
from jobrunner.checkpoint.encoding.dtypes import Tree
from jobrunner.checkpoint.encoding.encode import OWN_CODECS
from jobrunner.checkpoint.encoding.unmade import Unmade

_MOST_DIGITS = 1000
"""Hexadecimal; Python does not write very long ints as text."""

_WITH_ARRAY = frozenset({"array", "numbers", "str", "bytes"})
"""Kinds of which an index is that of an array."""


def show_outline(tree: Tree, array: Callable[[int], Any]) -> Any:
    """Return what a tree stands for, with `array` of its index in place of each array.

    `Unmade` stands for what would be made of arrays, by a library or by code of the job's; no such
    code is run. Raises `InvalidTreeError` if no encoder produces the tree.
    """
    try:
        return _Outline(array).show(tree)
    except RecursionError:
        raise InvalidTreeError("values are nested too deep") from None
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidTreeError(f"invalid value: {error}") from error


class _Outline:
    def __init__(self, array: Callable[[int], Any]) -> None:
        self._array = array

    def show(self, tree: Tree) -> Any:
        if type(tree) is list:
            return list(map(self.show, tree))
        if type(tree) is not dict:
            return tree
        if "$" in tree:
            return self._show_node(tree["$"], tree["of"])
        return {key: self.show(item) for key, item in tree.items()}

    def _show_node(self, kind: str, content: Tree) -> Any:
        if kind in _WITH_ARRAY and type(content) is int:
            shown = self._array(content)
            return shown if kind == "array" else Unmade(kind, shown)
        match kind:
            case "int" if len(content) > _MOST_DIGITS:
                return Unmade(kind, f"{len(content)} digits")
            case "int" | "float" | "str" | "bytes":
                return Decoder(self._array).decode({"$": kind, "of": content})
            case "state":
                return self.show(content[1])
            case "enum" | "namedtuple" | "dataclass":
                return Unmade(content[0], self.show(content[2]))
            case "codec":
                return Unmade(f"codec {content[0]}", self.show(content[1]))
            case "pickle":
                return Unmade(kind, {"nbytes": self._array(content[0]).shape[0]})
        parts = self.show(content)
        with contextlib.suppress(Exception):  # parts may be other than they are in the value
            if kind == "tuple":
                return tuple(parts)
            if kind == "dict":
                return dict(zip(*parts, strict=True))
            codec = OWN_CODECS.named(kind)
            if codec is not None:
                return codec.decode(parts)
        return Unmade(kind, parts)
