"""Changes to a checkpoint directory, as a stranger, a broken disk or a careless hand makes them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from jobrunner.checkpoint.encoding import decode
from tests.mutants.trees import HEAD_BYTES, Odd, Tree, dump, is_root, split_entry

CANARY = "canary_of_the_mutants"
"""A module that would say so if it were imported, and a directory outside of the mutant's root."""

_NUMBERS = (
    *(-1, 0, 1, 2, 3, 255, 127, 128, 1 << 31, 1 << 33, 1 << 53, (1 << 62) - 1, 1 << 63),
    *(10**15, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf")),
)
_TEXTS = (
    *("", "x", "\0", "a\nforged", "\ud800", "\u202e\x1b[31m", "é" * 300, "a" * 5000, "%d%s{}", "-1", "latest"),
    *("..", ".", "/", "../../../canary/file", "../../canary", "/etc/passwd", "_log", "_runs", "zarr.json"),
    *("0" * 64, "g" * 64, "f" * 32, f"{CANARY}:Thing", f"{CANARY}.Thing", "os:system", "builtins:eval"),
    *("antigravity:x", "subprocess:Popen", "pickle", "<f8", ">U3", "|O", "O", "object", "StringDType"),
    *("float128", "M8[D]", "|V0", "<U0", "2000-01-01", "9999-99-99T99:99", "zstd", "gzip", "blosc"),
)  # fmt: skip
_KINDS = (
    *decode._KINDS,
    *(codec.name for codec in decode.OWN_CODECS),
    *decode.BY_NAME,
    *("unknown", "commit", "state", "repair"),
)
_CHANGES = (
    *(
        "replace",
        "replace",
        "nudge",
        "nudge",
        "delete",
        "rename",
        "add",
        "swap",
        "kind",
        "multiply",
    ),
)
_BYTES = ("odd", "flip", "cut", "extend", "ones")
_ODD_JSON = (b"NaN,", b"9" * 10_000, b"[" * 100_000, b"1e999", b'"\\ud800"', b"\xff\xfe")
_NAMES = (
    *("_log/0000000000.json", "_log/0000000128.json", "_log/9999999999999.json", "_log/x"),
    *("_log/00000000001.json", "_log/٠٠٠٠٠٠٠٠٠٩.json", f"_log/{'9' * 200}.json", "_runs/x"),
    *("_log/.0000000001.ab.tmp", "_runs/" + "0" * 32 + "/heartbeat", "a.0/more", "a.0.r7/zarr.json"),
    *("a.0/zarr.retired.json", "a.99", "a.99/zarr.json", f"a.{'9' * 100}/zarr.json", "a.0.r1/x"),
    *("%2E%2E.0/zarr.json", "\x1b[31m.3/zarr.json", "\udcff.4"),
)  # fmt: skip


def mutate(draw: random.Random, tree: Tree) -> str:
    """Change a tree in place; returns what was done, in words."""
    name = draw_file(draw, tree)
    content = tree[name]
    chance = draw.random()
    if chance < 0.25 or isinstance(content, Odd):
        return change_files(draw, tree, name)
    if chance < 0.45 or not name.endswith(".json"):
        how = draw.choice(_BYTES)
        tree[name] = change_bytes(draw, content, how)
    else:
        how = draw.choice(_CHANGES)
        tree[name] = change_json(draw, name, content, how)
    return f"{how} in {name}"


def draw_file(draw: random.Random, tree: Tree) -> str:
    """A file: documents of jobrunner more often than those of Zarr and chunks."""
    log = [name for name in tree if name.startswith("_log/")]
    own = log + [name for name in tree if is_root(name)]
    return draw.choice(draw.choice((log, own, own, list(tree))) or list(tree))


# ---- JSON


def change_json(draw: random.Random, name: str, content: bytes, how: str) -> bytes:
    """Change a JSON document but not its digest; as it was if it is none."""
    try:
        if name.startswith("_log/"):
            entry = dump(change_value(draw, split_entry(content), how))
            return content[:HEAD_BYTES] + entry + b"}\n"
        document = json.loads(content)
        if not is_root(name) or draw.random() < 0.3:
            return dump(change_value(draw, document, how))
        entry = document["attributes"]["/jobrunner"]
        seal = entry.pop("sha256")
        document["attributes"]["/jobrunner"] = entry = change_value(draw, entry, how)
        entry["sha256"] = seal  # at the end, where it was
        return dump(document)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return content


def change_value(draw: random.Random, document: Any, how: str) -> Any:
    """Change a JSON document somewhere."""
    box = [document]
    holder, key = draw_place(draw, box)
    value = holder[key]
    match how:
        case "replace":
            holder[key] = draw_value(draw)
        case "nudge":
            holder[key] = nudged(draw, value)
        case "delete":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[draw.choice((*_TEXTS, *holder))] = holder.pop(key)
        case "add" if isinstance(value, dict):
            value[draw.choice((*_TEXTS, *_KINDS))] = draw_value(draw)
        case "add" if isinstance(value, list):
            value.insert(draw.randrange(len(value) + 1), draw_value(draw))
        case "swap":
            other, place = draw_place(draw, box)
            swapped = copy.deepcopy(other[place])
            other[place] = copy.deepcopy(value)
            holder[key] = swapped
        case "kind":
            nodes = [node for node in dicts_in(document) if {"$", "kind"} & node.keys()]
            node = draw.choice(nodes)
            node["$" if "$" in node else "kind"] = draw.choice(_KINDS)
        case _:
            holder[key] = multiplied(draw, value)
    return box[0]


def draw_place(draw: random.Random, box: list[Any]) -> tuple[Any, Any]:
    """A container in it and a key: level by level, so that long lists do not hide all others."""
    holder, key = box, 0
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.88:
        holder = holder[key]
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    return holder, key


def draw_value(draw: random.Random) -> Any:
    """Anything."""
    match draw.randrange(8):
        case 0:
            return draw.choice((None, True, False))
        case 1 | 2:
            return draw.choice(_NUMBERS)
        case 3 | 4:
            return draw.choice(_TEXTS)
        case 5:
            shallow = ([], {}, [[]], [0], [None], {"a": 1}, [[0, 1, 10**15, 0, 1]])
            return draw.choice((*shallow, deep(60), deep(400)))
        case 6:
            return {"$": draw.choice(_KINDS), "of": draw_value(draw)}
        case _:
            return [draw_value(draw) for _ in range(draw.randrange(1, 4))]


def deep(levels: int) -> Any:
    """A value nested so deep."""
    value: Any = 0
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def nudged(draw: random.Random, value: Any) -> Any:
    """Another value of the same type, close to the old one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice((value + 1, value - 1, -value, value * 2, value + (1 << 32)))
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        return draw.choice((value[:at], value[at:], value + "0", value.upper(), value[::-1]))
    if isinstance(value, list):
        return draw.choice((value[:-1], value + value[-1:], value[::-1], value * 2))
    if isinstance(value, dict):
        return dict(draw.sample(list(value.items()), len(value)))
    return value


def multiplied(draw: random.Random, value: Any) -> Any:
    """Very many items where there are some."""
    if isinstance(value, list) and value:
        return value + value[:1] * min(20_000, 1 + 1_000_000 // len(dump(value[0])))
    if isinstance(value, dict) and value:
        some = next(iter(value.values()))
        return value | {f"k{i}": some for i in range(min(20_000, 1_000_000 // len(dump(some))))}
    return deep(draw.choice((900, 5_000)))


def dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from dicts_in(item)


# ---- bytes and files


def change_bytes(draw: random.Random, content: bytes, how: str) -> bytes:
    """Change some bytes; the length of a part may be all ones, and JSON such as nobody reads."""
    at = draw.randrange(len(content) + 1)
    match how:
        case "flip" if content:
            changed = bytearray(content)
            for _ in range(draw.choice((1, 1, 2, 8))):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return bytes(changed)
        case "cut":
            return content[:at]
        case "extend":
            return content + draw.choice((b"\0", b"}", b"\n", b"x" * 100, bytes(100_000), content))
        case "ones":
            return content[:at] + b"\xff" * min(8, len(content) - at) + content[at + 8 :]
        case _:
            at = content.find(b":", at) + 1
            return content[:at] + draw.choice(_ODD_JSON) + content[at:]


def change_files(draw: random.Random, tree: Tree, name: str) -> str:
    """Move, remove or replace a whole file or directory."""
    parts = name.split("/")
    top = "/".join(parts[: draw.randrange(1, len(parts) + 1)])
    below = [path for path in tree if path == top or path.startswith(f"{top}/")]
    other, new = draw_file(draw, tree), draw.choice(_NAMES)
    how = draw.choice(
        ("remove", "remove", "swap", "copy over", "copy", "move", "link", "odd", "new")
    )
    match how:
        case "remove" | "move" | "link":
            moved = {path: tree.pop(path) for path in below}
            if how == "move":
                tree.update({new + path[len(top) :]: it for path, it in moved.items()})
            elif how == "link":
                up = "../" * (top.count("/") + 2)
                targets = (f"{up}canary", f"{up}canary/file", f"{up}canary/store", top, "nowhere")
                tree[top] = Odd("link", draw.choice(targets))
        case "swap":
            tree[name], tree[other] = tree[other], tree[name]
        case "copy over":
            tree[name] = tree[other]
        case "copy":
            tree[new] = tree[name]
        case "odd":
            tree[name] = Odd(draw.choice(("directory", "pipe", "unreadable", "sparse")))
        case _:
            tree[new] = draw.choice((b"", b"x", b"{}", Odd("directory"), Odd("pipe")))
    return f"{how}: {top}, {name}, {other}, {new:.60}"
