"""The ways in which a job runs, and how a job that fails is made small."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.fuzz.calls import Call
from tests.fuzz.jobs import without

MOST_SECONDS = 60


@dataclass(frozen=True)
class Way:
    """How a job runs."""

    epochs: int
    steps: int = 1
    workers: tuple[int, ...] = (0, 0, 0)  # of each node
    then: tuple[int, ...] = (0, 0, 0)  # the same after a resume
    manager: str = ""  # "", "sync" or "async"
    saves: str = "epochs=1"  # the arguments of `SaveEvery`
    story: str = "straight"  # or "extend", "fail", "recover"
    at: int = 1  # where: the epoch, and the step
    at_step: int = 0
    changes: bool = False  # the job has other nodes and blobs when it resumes
    watches: bool = False  # the client looks at all blobs after each epoch
    batch_seconds: float = 0.05


def draw_way(seed: int) -> Way:
    """Draw how the seeds that begin with this one run."""
    chance = random.Random(f"way {seed}")
    epochs, steps = chance.randint(2, 4), chance.choice([1, 1, 2, 3])
    manager = chance.choice(["", "", "", "sync", "async"])
    saves = chance.choice(
        ["epochs=1", "epochs=1", "epochs=2", *(["steps=1"] * (manager != "async"))]
    )
    return Way(
        epochs,
        steps,
        workers=_placed(chance),
        then=_placed(chance),
        manager=manager,
        saves=saves,
        story=chance.choice(
            ["extend", "fail", "recover"] if manager else ["straight", "straight", "recover"]
        ),
        at=chance.randint(1, epochs - 1),
        at_step=chance.randrange(steps),
        watches=chance.random() < 0.4,
        batch_seconds=chance.choice([0.0, 0.05]),
        changes=bool(manager) and chance.random() < 0.5,
    )


def _placed(chance: random.Random) -> tuple[int, ...]:
    count = chance.randint(1, 3)
    first = chance.randrange(3)
    return tuple((first + i % count) % 3 for i in range(3))


def kind_of(wrong: str) -> str:
    """What is wrong, without names and values: a smaller job must fail in the same way."""
    if not wrong:
        return ""
    if "\n  found " in wrong:
        shown = [line.split(" ", 3)[-1] for line in wrong.splitlines()[1:]]
        ties = [re.sub(r"\('same as', \d+\)", "", line).count("same") for line in shown]
        return f"{len(shown)} {ties}" + wrong.split(":")[0].split("epoch")[0].split(" of ")[0]
    return re.sub(r"\S*\d\S*|Task.*?epoch|node '.'", "", wrong.strip().splitlines()[-1])[:90]


def smallest(
    attempt: Callable[[Sequence[Call], Way], str], calls: Sequence[Call], way: Way
) -> tuple[list[Call], Way]:
    """Leave out what a failure does not need, for at most a minute."""
    until = time.monotonic() + MOST_SECONDS
    calls = list(calls)
    kind = kind_of(attempt(calls, way))

    def fails(calls: Sequence[Call], way: Way) -> bool:
        return time.monotonic() < until and kind_of(attempt(calls, way)) == kind

    size = len(calls)
    while size:
        for start in range(0, len(calls), size):
            fewer = without(calls, {call.number for call in calls[start : start + size]})
            if len(fewer) < len(calls) and fails(fewer, way):
                calls = fewer
                break
        else:
            size //= 2
    for simpler in (
        {"story": "straight", "manager": ""},
        {"workers": (0, 0, 0), "then": (0, 0, 0)},
        {"workers": (0, 0, 0)},
        {"steps": 1, "at_step": 0},
        {"watches": False},
        {"changes": False},
        {"batch_seconds": 0.0},
        {"manager": "sync", "saves": "epochs=1"} if way.manager else {},
        {"epochs": 2, "at": 1},
        {"epochs": 1} if way.story == "straight" else {},
    ):
        other = replace(way, **simpler)
        if other != way and fails(calls, other):
            way = other
    for i, call in enumerate(calls):
        for simpler in (
            {"after": ()},
            {"is_fetched": False},
            {"instances": 1},
            {"reads": call.reads[:1]},
            {"updates": call.updates[:1]},
            {"outputs": call.outputs[:1]},
            {"does": "make"},
            {"reads": ()},
            {"updates": ()},
        ):
            other_call = replace(calls[i], **simpler)
            other_calls = without([*calls[:i], other_call, *calls[i + 1 :]], set())
            if (
                other_call != calls[i]
                and len(other_calls) == len(calls)
                and fails(other_calls, way)
            ):
                calls = other_calls
    return calls, way


def tell(calls: Sequence[Call], way: Way) -> str:
    """A job in words."""
    lines = [str(way)]
    for call in calls:
        reads = ", ".join(
            f"t{read}.output()" if isinstance(read, int) else "/".join(read) for read in call.reads
        )
        line = f"{call.group:5} {call.node}/{call.name}: {', '.join(call.outputs) or '-'} = {call.does}({reads})"
        line += f" updates {', '.join(call.updates)}" if call.updates else ""
        lines.append(line + f"   [salt {call.salt}]")
    return "\n".join(lines)
