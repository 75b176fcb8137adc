"""What stands for values that are not made. Runs no code of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobrunner.checkpoint.encoding.schema import Count, Shape

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.dtypes import Tree


@dataclass(frozen=True, slots=True, eq=False)
class SavedObject:
    """Stands for a value of a class that this process does not have.

    Two of the same class and fields are equal, and may be keys and members of sets.

    Parameters
    ----------
    cls : str
        Module and qualified name of the class, joined by a colon.
    fields : dict
        The fields of a dataclass or named tuple; ``name`` and ``value`` of an enumeration's member.
    """

    cls: str
    fields: dict[str, Any]
    # Once each: a forged object may hold another twice, that one a third twice, and so on.
    _hash: int | None = field(default=None, init=False, repr=False)
    _twin: SavedObject | None = field(default=None, init=False, repr=False)

    def __hash__(self) -> int:
        if self._hash is None:
            try:
                found = hash((self.cls, frozenset(self.fields.items())))
            except TypeError:  # of a class that compares its objects in another way
                found = object.__hash__(self)
            object.__setattr__(self, "_hash", found)
        return self._hash  # type: ignore[return-value]  # it is an int by now

    def __eq__(self, other: object) -> bool:
        if type(other) is not SavedObject:
            return NotImplemented
        if (self._twin or self) is (other._twin or other):
            return True
        is_equal = self.cls == other.cls and self.fields == other.fields
        if is_equal and hash(self) == hash(other):  # nothing in them can change
            object.__setattr__(other, "_twin", self._twin or self)
        return is_equal


@dataclass(frozen=True, slots=True, eq=False)
class ValueOutline:
    """Stands in an outline for a pickle, a tensor, the value of a codec, or what is made of arrays."""

    kind: str
    about: Mapping[str, Any]
    text: str

    def __repr__(self) -> str:
        return self.text


class OutlinedError(Exception):
    """Raised in an outline where a value of columns would be made; the message says what it holds."""


def outlined(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, but for an outline of what it would make of columns."""

    def outline(decoder: Any, *fields: Any) -> Any:
        try:
            return method(decoder, *fields)
        except OutlinedError as found:
            text = str(found)
            return ValueOutline(kind, {"value": text}, f"{kind} of {text}")

    return outline


def outline_columns(leaf: Callable[[int], Any], *columns: Tree) -> OutlinedError:
    """Describe what columns hold, from the shapes of their arrays."""
    found = [_describe_column(leaf, it) for it in columns]
    return OutlinedError(f"{found[0][0]} x {': '.join(text for _, text in found)}")


def _describe_column(leaf: Callable[[int], Any], tree: Tree) -> tuple[int, str]:
    """Return how many items a column has, and what they are."""
    kind = tree["$"]
    if (opening := _BRACKETS.get(kind)) is None:
        if kind == "nodes":
            return _describe_column(leaf, tree["of"])[0], "values"
        if kind == "mixed":
            kinds = set(map(_name_kind, tree["values"]))
            kinds |= {_describe_column(leaf, it)[1] for it in tree["columns"]}
            return leaf(tree["kinds"]).shape[0], " | ".join(sorted(kinds))
        if kind == "again":
            text = _describe_column(leaf, tree["of"])[1] if "of" in tree else "rows above"
            return leaf(tree["at"]).shape[0], text
        if "count" in tree:
            return tree["count"], "str"
        about = leaf(tree["at"] if kind == "numbers" else tree["lengths"])
        return about.shape[0], _NAMES.get(kind, str(about.dtype))
    start, end = opening or (f"{tree['cls'].rpartition(':')[2]}(", ")")
    if "at" in tree:
        about = leaf(tree["at"])
        return about.shape[0], f"{start}{about.shape[1]} x {about.dtype}{end}"
    if "lengths" in tree:
        held = [_describe_column(leaf, tree[it])[1] for it in ("keys", "items") if tree.get(it)]
        return leaf(tree["lengths"]).shape[0], f"{start}{': '.join(held)}, ...{end}"
    found = [_describe_column(leaf, it) for it in tree["columns"]]
    names = tree.get("names") or [""] * len(found)
    fields = (
        f"{name}: {text}" if name else text for name, (_, text) in zip(names, found, strict=True)
    )
    return found[0][0], f"{start}{', '.join(fields)}{end}"


def _name_kind(value: Tree) -> str:
    """Name the type of a value that a column repeats."""
    if type(value) is not dict:
        return "None" if value is None else type(value).__name__
    name = str(value.get("cls", value["$"]))
    return name.rpartition(":")[2]


_NAMES = {"texts": "str", "buffers": "bytes", "bytearrays": "bytearray"}
_BRACKETS: Mapping[str, Any] = {
    "tuples": "()",
    "lists": "[]",
    "dicts": "{}",
    "sets": "{}",
    "frozensets": "{}",
    "namedtuples": "",
    "dataclasses": "",
}


def outline_row(decoder: Any, of: Count, at: Count) -> Any:
    """Tell its number."""
    return ValueOutline("row", {"value": f"row {at}"}, f"row {at} of column {of}")


def outline_pickle(
    decoder: Any,
    digits: str | None = None,
    at: Count | None = None,
    classes: list[str] | None = None,
) -> Any:
    """Tell its size."""
    nbytes = len(digits or "") // 2 if at is None else decoder.leaf(at).shape[0]
    return ValueOutline("pickle", {"nbytes": nbytes}, f"pickle of {nbytes} bytes")


def outline_tensor(
    decoder: Any, at: Count | None, shape: Shape, dtype: str, requires_grad: bool, parameter: bool
) -> Any:
    """Tell its dtype and shape."""
    dtype = dtype.removeprefix("torch.")
    text = f"tensor {dtype}[{' x '.join(map(str, shape))}]"
    return ValueOutline("tensor", {"shape": list(shape), "dtype": dtype}, text)


def outline_codec(decoder: Any, name: str, value: Tree) -> Any:
    """Outline what its codec made of it."""
    inner = repr(decoder.decode(value))
    return ValueOutline("codec", {"codec": name, "value": inner}, f"{name}({inner})")


def outline_array(kind: str) -> Callable[..., Any]:
    """Return the function that outlines a value of this kind, which is made of arrays."""

    def outline(decoder: Any, *fields: Any) -> Any:
        data, *others = fields
        inner = decoder.decode(data)
        for other in others:
            decoder.decode(other)  # what it contains has numbers
        return ValueOutline(kind, {"value": repr(inner)}, f"{kind} {inner!r}")

    return outline
