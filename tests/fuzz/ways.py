"""The ways in which a job runs, and how a job that fails is made small."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.fuzz.calls import Call
from tests.fuzz.rules import Rules


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


def smallest(
    attempt: Callable[[Sequence[Call], Way], str], calls: Sequence[Call], way: Way
) -> list[Call]:
    """Leave out each task without which the job still fails."""
    calls = list(calls)
    for call in reversed(calls):
        fewer = [
            replace(other, after=tuple(n for n in other.after if n != call.number))
            for other in calls
            if other.number != call.number
        ]
        if is_whole(fewer) and attempt(fewer, way):
            calls = fewer
    return calls


def is_whole(calls: Sequence[Call]) -> bool:
    """Whether what the tasks read and update exists, so that the rules can run them."""
    try:
        rules = Rules(calls)
        rules.step()
        rules.run("exit")
    except KeyError:
        return False
    return True


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
