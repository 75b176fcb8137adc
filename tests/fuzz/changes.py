"""A job that has changed when it resumes: blobs and nodes that are new, others gone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.fuzz.calls import Call

FIRST_NUMBER = 900_000  # of the tasks added here


@dataclass
class Change:
    """What changes; the job has `before` when it begins, and `after` when it resumes."""

    before: list[Call]
    after: list[Call]
    added: frozenset[int] = frozenset()  # init tasks to run at the resume


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
    reads = chance.sample([key for key in saved if not key[1].endswith(".u")], 1) if saved else []
    old = _extra(0, "old", chance.choice([*nodes, "old"]), ())
    new = _extra(2, "new", chance.choice([*nodes, "new"]), tuple(reads))
    before, after = _in_order([*calls, *old]), _in_order([*calls, *new])
    return Change(before, after, frozenset({new[0].number}))


def _extra(number: int, blob: str, node: str, reads: tuple[tuple[str, str], ...]) -> list[Call]:
    """A blob that an init task makes, and that each epoch changes."""
    first = FIRST_NUMBER + number
    does = "same" if reads else "make"
    return [
        Call(first, "init", node, does, number, reads=reads, outputs=(blob,)),
        Call(first + 1, "epoch", node, "mix", number, reads=((node, blob),), outputs=(blob,)),
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
