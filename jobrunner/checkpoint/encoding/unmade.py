"""What stands for a value that is not made. Runs no code of a checkpoint."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.encoding.codecs import InvalidTreeError
from jobrunner.checkpoint.encoding.dtypes import Tree
from jobrunner.texts import printable

_WITH_ARRAY = frozenset({"numbers", "bytes", "json"})
"""Kinds that are made of an array, given by its index."""


@dataclass(frozen=True, slots=True, eq=False)
class Unmade:
    """Stands for a value that this process cannot make, or that an outline does not make.

    Parameters
    ----------
    kind : str
        Its type: the name of a kind of ours or of a library's class; "codec" and the name of a
        user's codec; module and qualified name of a class that this process does not have, joined by
        a colon; or "pickle".
    parts : object
        What it is made of: its fields, its arrays or stand-ins for them, the size of a pickle.
    """

    kind: str
    parts: Any

    def __repr__(self) -> str:
        name = self.kind.removeprefix("codec ")
        return printable(f"{name}({self.parts!r})", kept="")


def show_outline(tree: Tree, array: Callable[[int], Any]) -> Any:
    """Return what a tree stands for, with `array` of its index in place of each array.

    Numbers, texts, lists, tuples and dicts with texts as keys are made; `Unmade` stands for the rest.
    Raises `InvalidTreeError` if no encoder produces the tree.
    """
    try:
        return _outline(tree, array)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise InvalidTreeError(f"invalid value: {error}") from error


def _outline(tree: Tree, array: Callable[[int], Any]) -> Any:
    if type(tree) is list:
        return [_outline(item, array) for item in tree]
    if type(tree) is not dict:
        return tree
    if "$" not in tree:
        return {key: _outline(item, array) for key, item in tree.items()}
    # A stranger may have written the content, so it may be anything: what does not fit raises one of
    # the errors that `show_outline` turns into one.
    kind, content = tree["$"], tree["of"]
    if kind in _WITH_ARRAY and type(content) is int:
        return Unmade(kind, array(content))
    match kind:
        case "array":
            return array(content)
        case "int":
            return int(content, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "pickle":
            return Unmade(kind, {"nbytes": array(content[0]).shape[0]})
        case "state":
            return _outline(content[1], array)
        case "instance":
            return Unmade(content[0], _outline(content[-1], array))
        case "codec":
            return Unmade(f"codec {content[0]}", _outline(content[1], array))
    parts = _outline(content, array)
    if kind == "tuple" and type(parts) is list:
        return tuple(parts)
    return Unmade(kind, parts)
