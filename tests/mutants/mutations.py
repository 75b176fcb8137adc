"""Changes to a checkpoint directory, as a stranger, a broken disk or a careless hand makes them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from jobrunner.checkpoint.encoding import decode
from tests.mutants.trees import HEAD_BYTES, Odd, Tree, dump, split_entry

CANARY = "canary_of_the_mutants"
"""A module that would say so if it were imported, and a directory beside the mutant."""

_NUMBERS = (
    *(-1, 0, 1, 2, 3, 255, 127, 128, 1 << 31, 1 << 33, 1 << 53, (1 << 62) - 1, 1 << 63),
    *(10**15, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf")),
)
_TEXTS = (
    *("", "x", "\0", "a\nforged", "\ud800", "\u202e\x1b[31m", "é" * 300, "a" * 5000, "%d%s{}", "-1", "latest"),
    *("..", ".", "/", "../../canary/file", "../canary", "/etc/passwd", "_log", "_runs", "zarr.json"),
    *("0" * 64, "g" * 64, "f" * 32, f"{CANARY}:Thing", f"{CANARY}.Thing", "os:system", "builtins:eval"),
    *("antigravity:x", "subprocess:Popen", "pickle", "<f8", ">U3", "|O", "O", "object", "StringDType"),
    *("float128", "M8[D]", "|V0", "<U0", "2000-01-01", "9999-99-99T99:99", "zstd", "gzip", "blosc"),
)  # fmt: skip
_KINDS = (
    *decode._KINDS,
    *(codec.name for codec in decode.OWN_CODECS),
    *decode.BY_NAME,
    "unknown",
)


def deep(levels: int, *, is_dict: bool = False) -> Any:
    """A value nested so deep."""
    value: Any = 0
    for _ in range(levels):
        value = {"a": value} if is_dict else [value]
    return value


def draw_value(draw: random.Random) -> Any:
    """Anything."""
    match draw.randrange(9):
        case 0:
            return draw.choice((None, True, False))
        case 1 | 2:
            return draw.choice(_NUMBERS)
        case 3 | 4:
            return draw.choice(_TEXTS)
        case 5:
            return draw.choice(([], {}, [[]], [0], [None], {"a": 1}, [[0, 1, 10**15, 0, 1]]))
        case 6:
            return deep(draw.choice((3, 60, 400)), is_dict=draw.random() < 0.5)
        case 7:
            return {"$": draw.choice(_KINDS), "of": draw_value(draw)}
        case _:
            return [draw_value(draw) for _ in range(draw.randrange(1, 4))]


# ---- JSON

Trail = tuple[Any, ...]


def places(value: Any, trail: Trail = ()) -> Iterator[Trail]:
    """Where all values in a JSON document are."""
    yield trail
    items: Any = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield from places(item, (*trail, key))


def draw_place(draw: random.Random, document: Any) -> Trail:
    """A place in a document: level by level, so that long lists do not hide all others."""
    trail: Trail = ()
    while isinstance(document, dict | list) and document:
        if trail and draw.random() < 0.12:
            break
        keys = list(document) if isinstance(document, dict) else range(len(document))
        key = draw.choice(keys)
        trail, document = (*trail, key), document[key]
    return trail


def value_at(document: Any, trail: Trail) -> Any:
    for key in trail:
        document = document[key]
    return document


def _put(document: Any, trail: Trail, value: Any) -> Any:
    if not trail:
        return value
    value_at(document, trail[:-1])[trail[-1]] = value
    return document


def replace_value(draw: random.Random, document: Any) -> Any:
    return _put(document, draw_place(draw, document), draw_value(draw))


def nudge_value(draw: random.Random, document: Any) -> Any:
    """Another value of the same type, close to the old one."""
    trail = draw_place(draw, document)
    value = value_at(document, trail)
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int | float):
        value = draw.choice((value + 1, value - 1, -value, value * 2, value + (1 << 32)))
    elif isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        value = draw.choice((value[:at], value[at:], value + "0", value.upper(), value[::-1]))
    elif isinstance(value, list):
        value = draw.choice((value[:-1], value + value[-1:], value[::-1], value * 2))
    elif isinstance(value, dict):
        items = list(value.items())
        draw.shuffle(items)
        value = dict(items)
    return _put(document, trail, value)


def delete_value(draw: random.Random, document: Any) -> Any:
    if trail := draw_place(draw, document):
        del value_at(document, trail[:-1])[trail[-1]]
    return document


def rename_key(draw: random.Random, document: Any) -> Any:
    trail = draw_place(draw, document)
    while trail and not isinstance(trail[-1], str):
        trail = trail[:-1]
    if trail:
        holder = value_at(document, trail[:-1])
        holder[draw.choice((*_TEXTS, *holder))] = holder.pop(trail[-1])
    return document


def add_value(draw: random.Random, document: Any) -> Any:
    trail = draw_place(draw, document)
    holder = value_at(document, trail)
    if isinstance(holder, dict):
        holder[draw.choice((*_TEXTS, *_KINDS))] = draw_value(draw)
    elif isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), draw_value(draw))
    return document


def swap_values(draw: random.Random, document: Any) -> Any:
    one, other = draw_place(draw, document), draw_place(draw, document)
    if one and other:
        first = copy.deepcopy(value_at(document, one))
        second = copy.deepcopy(value_at(document, other))
        for trail, value in ((one, second), (other, first)):
            try:
                _put(document, trail, value)
            except (LookupError, TypeError):  # one was inside the other
                return document
    return document


def change_kind(draw: random.Random, document: Any) -> Any:
    """Another kind of value in a blob's tree, or another kind of entry."""
    nodes = [
        trail
        for trail in places(document)
        if isinstance(value := value_at(document, trail), dict) and {"$", "kind"} & value.keys()
    ]
    if nodes:
        node = value_at(document, draw.choice(nodes))
        node["$" if "$" in node else "kind"] = draw.choice((*_KINDS, "commit", "state", "repair"))
    return document


def multiply_value(draw: random.Random, document: Any) -> Any:
    """Very many items where there are some."""
    trail = draw_place(draw, document)
    value = value_at(document, trail)
    if isinstance(value, list | dict) and value:
        some = next(iter(value if isinstance(value, list) else value.values()))
        count = min(20_000, 1 + 1_000_000 // len(dump(some)))
        if isinstance(value, list):
            value = value + [some] * count
        else:
            value = {**value, **{f"k{i}": some for i in range(count)}}
    else:
        value = deep(draw.choice((900, 5_000)))
    return _put(document, trail, value)


JSON_CHANGES: tuple[Callable[[random.Random, Any], Any], ...] = (
    *(replace_value, replace_value, nudge_value, nudge_value, delete_value, rename_key, add_value),
    *(swap_values, change_kind, multiply_value),
)  # fmt: skip


# ---- bytes


def odd_text(draw: random.Random, content: bytes) -> bytes:
    """JSON that is not: a key twice, NaN, a number of 10,000 digits, a bottomless list."""
    at = content.find(b":", draw.randrange(max(1, len(content))))
    if at < 0:
        return content
    insert = draw.choice(
        (b"NaN,", b"Infinity", b"9" * 10_000, b"[" * 100_000, b"1e999", b'"\\ud800"', b"\xff\xfe")
    )
    return content[: at + 1] + insert + content[at + 1 :]


def flip(draw: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if found:
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def extend(draw: random.Random, content: bytes) -> bytes:
    return content + draw.choice((b"\0", b"}", b"\n", b"x" * 100, bytes(100_000), content))


def ones(draw: random.Random, content: bytes) -> bytes:
    """A part that is all ones, as lengths in chunks of strings may be."""
    at = draw.randrange(len(content) + 1)
    return content[:at] + b"\xff" * min(8, len(content) - at) + content[at + 8 :]


BYTE_CHANGES = (odd_text, flip, cut, extend, ones)


# ---- files


def _other_name(draw: random.Random, tree: Tree) -> str:
    store = draw.choice([name.split("/")[0] for name in tree])
    return draw.choice(
        (
            *("_log/0000000000.json", "_log/0000000128.json", "_log/9999999999999.json"),
            *("_log/00000000001.json", "_log/٠٠٠٠٠٠٠٠٠٩.json", f"_log/{'9' * 200}.json"),
            *("_log/.0000000001.ab.tmp", "_log/x", "_runs/x", "_runs/" + "0" * 32 + "/heartbeat"),
            *(f"{store}/zarr.retired.json", f"{store}/more", "a.99", "a.99/zarr.json"),
            *(f"{store}.r7/zarr.json", f"a.{'9' * 100}/zarr.json", "a.0.r1/x"),
            *("%2E%2E.0/zarr.json", "\x1b[31m.3/zarr.json", "\udcff.4"),
        )
    )


def change_files(draw: random.Random, tree: Tree) -> set[str]:
    """Move, remove or replace whole files or directories; returns what has changed."""
    name = draw_file(draw, tree)
    other = draw_file(draw, tree)
    parts = name.split("/")
    top = "/".join(parts[: draw.randrange(1, len(parts) + 1)])
    below = [it for it in tree if it == top or it.startswith(f"{top}/")]
    match draw.randrange(10):
        case 0 | 1:
            for it in below:
                del tree[it]
            return set(below)
        case 2:
            tree[name], tree[other] = tree[other], tree[name]
            return {name, other}
        case 3:
            tree[name] = tree[other]
            return {name}
        case 4:
            new = _other_name(draw, tree)
            tree[new] = tree[name]
            return {new}
        case 5:
            new = _other_name(draw, tree)
            for it in below:
                tree[new + it[len(top) :]] = tree.pop(it)
            return set(below)
        case 6:
            tree[name] = Odd("directory")
        case 7:
            for it in below:
                del tree[it]
            up = "../" * (top.count("/") + 1)
            to = draw.choice(
                (f"{up}canary", f"{up}canary/file", f"{up}canary/store", top, "nowhere")
            )
            tree[top] = Odd("link", to)
        case 8:
            tree[name] = Odd(draw.choice(("pipe", "unreadable", "sparse")))
        case _:
            new = _other_name(draw, tree)
            tree[new] = draw.choice((b"", b"x", b"{}", Odd("directory"), Odd("pipe")))
            return {new}
    return {top}


# ---- a mutant


def is_root(name: str) -> bool:
    """Whether it is the root document of a store."""
    return name.count("/") == 1 and name.endswith("/zarr.json")


def draw_file(draw: random.Random, tree: Tree) -> str:
    """A file: documents of jobrunner more often than those of Zarr and chunks."""
    names = list(tree)
    own = [name for name in names if name.startswith("_log/") or is_root(name)]
    if own and draw.random() < 0.7:
        log = [name for name in own if name.startswith("_log/")]
        return draw.choice(log if log and draw.random() < 0.5 else own)
    return draw.choice(names)


def mutate(draw: random.Random, tree: Tree) -> tuple[set[str], str]:
    """Change a tree in place; returns the paths that changed, and what was done, in words."""
    what = draw.random()
    if what < 0.25:
        before = dict(tree)
        changed = change_files(draw, tree)
        gone = sorted(before.keys() - tree.keys())
        return changed, f"files: {sorted(changed)[:4]} changed, {gone[:4]} gone"
    name = draw_file(draw, tree)
    content = tree[name]
    if isinstance(content, Odd):
        return set(), f"nothing: {name}"
    if what < 0.45 or not name.endswith(".json"):
        change = draw.choice(BYTE_CHANGES)
        tree[name] = change(draw, content)
    else:
        change = draw.choice(JSON_CHANGES)
        tree[name] = change_json(draw, name, content, change)
    return {name}, f"{change.__name__}: {name}"


def change_json(
    draw: random.Random, name: str, content: bytes, change: Callable[[random.Random, Any], Any]
) -> bytes:
    """Change a JSON document but not its digest; as it was if it is none."""
    try:
        if name.startswith("_log/"):
            entry = dump(change(draw, split_entry(content)))
            return content[:HEAD_BYTES] + entry + b"}\n"
        document = json.loads(content)
        if not is_root(name) or draw.random() < 0.3:
            return dump(change(draw, document))
        seal = document["attributes"]["/jobrunner"].pop("sha256", None)
        entry = change(draw, document["attributes"]["/jobrunner"])
        document["attributes"]["/jobrunner"] = entry
        if seal is not None and isinstance(entry, dict):
            entry["sha256"] = seal
        return dump(document)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return content
