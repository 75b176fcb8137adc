"""Random jobs: what a seed draws, and the `Job` of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from jobrunner import Blob, Job, Node, Task, WorkspaceType
from tests.fuzz.calls import Call, CrashError, Function, Read, constant_of, global_names

NODES = ("a", "b", "c")
DOES = (
    *("make", "mix", "mix", "same", "same", "part", "part", "contain", "contain", "contain"),
    *("scribble", "cache", "buffer", "constant"),
)


class Draft:
    """A job while it is drawn: which blobs exist when its next task runs."""

    def __init__(self, seed: int, first: int, *, has_objects: bool) -> None:
        self.has_objects = has_objects
        self.chance = random.Random(seed)
        self.prefix = f"s{seed}."
        self.calls: list[Call] = []
        self.first = first
        self.nodes = self.chance.sample(NODES, self.chance.randint(1, 3))
        self.lasting: set[tuple[str, str]] = set()  # made by groups before
        self.made: set[tuple[str, str]] = set()  # by this group, private ones included

    def add(self, group: str, node: str, does: str, **more: object) -> Call:
        """Add a task."""
        number = self.first + len(self.calls)
        call = Call(
            number,
            group,
            node,
            does,
            self.chance.randrange(1 << 30),
            has_objects=self.has_objects,
            **more,
        )  # type: ignore[arg-type]
        self.calls.append(call)
        self.made.update((node, name) for name in call.outputs)
        return call

    def reads(self, group: str, most: int) -> tuple[Read, ...]:
        """What a task may read."""
        there: list[Read] = [*sorted(self.lasting | self.made)] * 2
        there += [call.number for call in self.calls if call.group == group]
        there += [
            call.number
            for call in self.calls
            if call.group == "init" != group and call.outputs and call.is_global is None
        ]
        count = self.chance.randint(0, most)
        return tuple(self.chance.choice(there) for _ in range(count)) if there else ()

    def name(self, letter: str) -> str:
        """A blob's name, of this job alone."""
        return self.prefix + letter

    # ---- the groups

    def draw(self) -> list[Call]:
        """Draw all groups."""
        self.init()
        self.end_group()
        for _ in range(self.chance.randint(1, 8)):
            self.task("epoch")
        self.end_group()
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            self.task("epoch_end")
        self.end_group()
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            self.task("exit")
        return self.calls

    def init(self) -> None:
        """The first values."""
        for node in self.nodes:
            for letter in self.chance.sample("xyz", self.chance.randint(1, 3)):
                does = self.chance.choice(["make", "make", "contain", "part", "cache", "constant"])
                reads = self.reads("init", 2)
                self.add("init", node, does, reads=reads, outputs=(self.name(letter),))
            if self.chance.random() < 0.3:
                self.task("init")
            if self.chance.random() < 0.15:
                name = self.name("t")
                self.add("init", node, "make", outputs=(name,), is_transient=True)

    def end_group(self) -> None:
        """Forget what lasts no longer than its group."""
        self.lasting |= {key for key in self.made if key[1][-1] in "xyztg"} & global_names(
            self.calls
        )
        self.made = set()

    def task(self, group: str) -> None:
        """One task of a group."""
        chance = self.chance
        node = chance.choice(self.nodes)
        letters = "xyzpq" if group == "init" else "xyzxyzpqg"
        kind = chance.choice(["none", "one", "one", "one", "two", "several"])
        letter = chance.choice(letters)
        outputs, is_global = (self.name(letter),), None
        if letter == "g":
            is_global = True
        elif letter in "pq" and (group == "init" or chance.random() < 0.3):
            is_global = False
        if kind == "none":
            outputs, is_global = (), None
        elif kind == "two" and letter in "xyz":
            outputs = tuple(map(self.name, chance.sample("xyz", 2)))
        instances = 2 if kind == "several" and group != "init" else 1
        there = sorted(name for its, name in self.lasting | self.made if its == node)
        updates = [
            name
            for name in chance.sample(there, min(len(there), chance.choice([0, 0, 1, 1, 2])))
            if name not in outputs and instances == 1 and not (group == "init" and name[-1] == "t")
        ]
        own = {(node, name) for name in updates}
        reads = tuple(read for read in self.reads(group, 3) if read not in own)
        before = [call.number for call in self.calls if call.group == group]
        does = chance.choice(DOES)
        self.add(
            group,
            node,
            does,
            reads=reads,
            updates=tuple(updates),
            outputs=outputs,
            after=tuple(chance.sample(before, 1)) if before and chance.random() < 0.15 else (),
            is_global=is_global,
            instances=instances,
            is_fetched=chance.random() < 0.3 and group != "init",
        )


def draw(seed: int, first: int = 0, *, has_objects: bool = True) -> list[Call]:
    """The tasks of the job of a seed, numbered from `first`."""
    return Draft(seed, first, has_objects=has_objects).draw()


def build(
    calls: Sequence[Call],
    steps: int,
    workers: Mapping[str, str],
    *,
    recovers: bool,
) -> tuple[Job, dict[int, Task]]:
    """The job, on the workers given for its nodes; whether it recovers from errors by itself."""
    nodes = {name: Node(name, workers=worker) for name, worker in workers.items()}
    tasks: dict[int, Task] = {}
    with Job("random", steps_per_epoch=steps) as job:
        groups = {**job.groups, "epoch_end": job.epoch_end_group}
        for call in calls:
            kinds = {True: WorkspaceType.GLOBAL, False: WorkspaceType.PRIVATE, None: None}
            kwargs = {"constant": constant_of(call)} if call.does == "constant" else {}
            task = Task(
                Function(call),
                inputs=[
                    tasks[read].output() if isinstance(read, int) else nodes[read[0]][read[1]]
                    for read in call.reads
                ],
                updates=call.updates,
                outputs=[Blob(name, transient=call.is_transient) for name in call.outputs],
                kwargs=kwargs,
                name=call.name,
                node=nodes[call.node],
                group=groups[call.group],
                workspace_type=kinds[call.is_global],
                num_instances=call.instances,
                transient_errors=CrashError if recovers else (),
                after=[tasks[number] for number in call.after],
            )
            tasks[call.number] = task
            if call.is_fetched:
                task.outputs()
    return job, tasks
