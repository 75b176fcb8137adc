"""Show what a tree stands for: makes no value of a user or a library, and reads no arrays of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jobrunner.checkpoint.encoding.decode import Decoder
from jobrunner.checkpoint.encoding.dtypes import Tree
from jobrunner.checkpoint.encoding.everyday import fields_of
from jobrunner.checkpoint.encoding.libraries import LibraryType
from jobrunner.checkpoint.encoding.unmade import Unmade

_MOST_SHOWN_BITS = 4096
"""Python does not write longer ints as text."""


class Outline(Decoder):
    """Decodes a blob with `leaf` for each array, and `Unmade` for what would be made of arrays."""

    def _lone_array(self, i: Tree) -> Any:
        self._num_unmade += 1
        return self._take(i, self._leaf)

    def _same(self, number: Tree) -> Any:
        return self._unmade("same", "as before")  # the rows of many have no numbers here

    def _int(self, digits: Tree) -> Any:
        number = super()._int(digits)
        if number.bit_length() > _MOST_SHOWN_BITS:
            return self._unmade("int", f"{number.bit_length()} bits")
        return number

    def _dict(self, tree: Tree) -> Any:
        keys, values = (self._items(items) for items in fields_of(tree, object, object))
        if len(keys) != len(values):
            return Unmade("dict", [keys, values])
        return dict(zip(keys, values, strict=True))

    def _items(self, tree: Tree) -> list[Any]:
        if type(tree) is list:
            return super()._items(tree)
        kind, content = tree["$"], tree["of"]
        match kind:
            case "numbers":
                parts = self._take(content, self._leaf)
            case "rows":
                parts = list(map(self._items, content[1]))
            case "ragged":
                parts = self._items(content[2])
            case "records":
                parts = dict(zip(content[0], map(self._items, content[1]), strict=True))
            case _:
                raise ValueError("it is not a list of items")
        return [self._unmade(kind, parts)]

    def _by_library(self, kind: LibraryType, tree: Tree) -> Any:
        return self._unmade(kind.name, self._parts(tree)[0])

    def _by_users_codec(self, tree: Tree) -> Any:
        name, content = fields_of(tree, str, object)
        return self._unmade(f"codec {name}", self._parts(content)[0])

    def _pickle(self, tree: Tree) -> Any:
        i, _, _ = fields_of(tree, int, list, list)
        outline: Any = self._take(i, self._leaf)
        return self._unmade("pickle", {"nbytes": outline.shape[0]})

    kinds: ClassVar[Mapping[str, Any]] = {
        **Decoder.kinds,
        "array": _lone_array,
        "same": _same,
        "int": _int,
        "dict": _dict,
        "codec": _by_users_codec,
        "pickle": _pickle,
    }
