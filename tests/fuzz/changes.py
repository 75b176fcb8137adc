"""A job that has changed when it resumes: other names, blobs and nodes that are new, others gone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.fuzz.calls import Call

FIRST_NUMBER = 900_000  # of the tasks added here


@dataclass
class Change:
    """What changes; the job has `before` when it begins, and `after` when it resumes."""

    before: list[Call]
    after: list[Call]
    nodes: dict[str, str] = field(default_factory=dict)  # old name -> new name
    blobs: dict[str, str] = field(default_factory=dict)
    added: frozenset[int] = frozenset()  # init tasks to run at the resume

    def key(self, key: tuple[str, str]) -> tuple[str, str]:
        """What a node and blob are called after it."""
        return self.nodes.get(key[0], key[0]), self.blobs.get(key[1], key[1])

    def rename(self) -> dict[str, str]:
        """The argument of `JobRunner`."""
        blobs = {f"*/{old}": f"*/{new}" for old, new in self.blobs.items()}
        return {**self.nodes, **blobs}


def draw_change(calls: Sequence[Call], seed: object) -> Change:
    """Draw how a job changes."""
    chance = random.Random(f"change {seed}")
    made = {
        (c.node, n) for c in calls if c.group == "init" and c.is_global is None for n in c.outputs
    }
    saved = sorted(
        key
        for key in made
        if not any(c.is_transient and key in {(c.node, n) for n in c.outputs} for c in calls)
    )
    nodes = sorted({node for node, _ in saved})
    if len(nodes) > 1 and chance.random() < 0.5:
        first, second = chance.sample(nodes, 2)
        names = {first: second, second: first}
    else:
        names = {node: f"{node}2" for node in chance.sample(nodes, min(len(nodes), 1))}
    every = sorted({name for _, name in saved if name.endswith(".z")})
    blobs = {name: f"{name}z" for name in chance.sample(every, min(len(every), 1))}
    change = Change([], [], names, blobs)
    reads = chance.sample([key for key in saved if not key[1].endswith(".u")], 1) if saved else []
    old = _extra(0, "old", chance.choice([*nodes, "old"]), ())
    there = [names.get(node, node) for node in nodes]
    new = _extra(2, "new", chance.choice([*there, "new"]), tuple(map(change.key, reads)))
    change.before = _in_order([*calls, *old])
    change.after = _in_order([*_renamed(calls, change), *new])
    change.added = frozenset({new[0].number})
    return change


def _extra(number: int, blob: str, node: str, reads: tuple[tuple[str, str], ...]) -> list[Call]:
    """A blob that an init task makes, and that each epoch changes."""
    first = FIRST_NUMBER + number
    does = "same" if reads else "make"
    return [
        Call(first, "init", node, does, number, reads=reads, outputs=(blob,)),
        Call(first + 1, "epoch", node, "mix", number, reads=((node, blob),), outputs=(blob,)),
    ]


def _renamed(calls: Sequence[Call], change: Change) -> list[Call]:
    def names(its: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(change.blobs.get(name, name) for name in its)

    return [
        replace(
            call,
            node=change.nodes.get(call.node, call.node),
            reads=tuple(change.key(it) if isinstance(it, tuple) else it for it in call.reads),
            updates=names(call.updates),
            outputs=names(call.outputs),
        )
        for call in calls
    ]


def _in_order(calls: Sequence[Call]) -> list[Call]:
    return [
        call
        for group in ("init", "epoch", "epoch_end", "exit")
        for call in calls
        if call.group == group
    ]


def names_of(calls: Sequence[Call]) -> Mapping[str, None]:
    """The nodes of a job."""
    return dict.fromkeys(call.node for call in calls)
