"""Chooses a worker for each node. Pure.

Nodes that require particular workers or resources are placed first. The others are shared out kind by
kind, where nodes of one kind run the same tasks: each worker gets its share of each kind, in proportion
to its threads, so no worker has all nodes that compute and another those that only write a log.
Neighbours in the order of definition share a worker, because they exchange most values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jobrunner.compile import PlannedNode
from jobrunner.config import largest
from jobrunner.errors import PlacementError
from jobrunner.texts import counted, format_bytes, listed

Near = Mapping[str, Mapping[str, int]]
"""How many bytes that a node begins with lie on which worker: node -> address -> bytes."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A Dask worker; `Node.workers` may name it by address, name or host."""

    address: str
    name: str
    host: str
    nthreads: int
    resources: Mapping[str, float] = field(default_factory=dict)  # total amounts, by name
    limit_bytes: int = 0  # of memory, at which its nanny kills it; 0: no limit

    def has_alias(self, alias: str) -> bool:
        """Whether Dask accepts `alias` for this worker: its address, name or host."""
        bare = self.address.partition("://")[2]
        return alias in (self.address, bare, self.name, self.host)


def place(
    nodes: Sequence[PlannedNode],
    workers: Sequence[WorkerInfo],
    previous: Mapping[str, str] | None = None,
    near: Near | None = None,
) -> dict[str, str]:
    """Choose a worker for every node; returns addresses by node, in the order of `nodes`.

    Nodes in `previous` stay on these workers if they still suit; other nodes there count as load. Others
    go where most of their bytes lie, as long as no worker has more than its share.
    The same arguments give the same placement. Raises a `PlacementError` if no worker suits a node.
    """
    if not workers:
        raise PlacementError(
            f"The cluster has no workers for {counted(len(nodes), 'node')}. Start some, or wait longer "
            f"for them."
        )
    previous = previous or {}
    by_address = {worker.address: worker for worker in workers}
    placing = _Placing(nodes, workers, near or {})
    names = {node.name for node in nodes}
    for name, address in previous.items():
        if name not in names and address in by_address:
            placing.count("", address)
    for node in nodes:
        worker = by_address.get(previous.get(node.name, ""))
        if worker is not None and _suits(node, worker, placing.free[worker.address]):
            placing.put(node, worker)
    placing.place_demanding()
    kinds: dict[str, list[PlannedNode]] = {}
    for node in nodes:
        kinds.setdefault(node.kind, []).append(node)
    for kind, members in kinds.items():
        placing.share_out(kind, members)
    return {node.name: placing.placed[node.name] for node in nodes}


class _Placing:
    """What is placed so far, and what the workers have left."""

    def __init__(
        self, nodes: Sequence[PlannedNode], workers: Sequence[WorkerInfo], near: Near
    ) -> None:
        self._nodes = nodes
        self._near = near
        self._workers = workers
        self.free = {worker.address: dict(worker.resources) for worker in workers}
        self._load = Counter[str]()  # nodes, by worker
        self._load_by_kind: dict[str, Counter[str]] = {}
        self.placed: dict[str, str] = {}

    def place_demanding(self) -> None:
        """Place nodes that require workers or resources: first those with the fewest choices."""
        choices: dict[str, list[WorkerInfo]] = {}
        demanding: list[PlannedNode] = []
        for node in self._nodes:
            if node.name not in self.placed and (node.workers or node.resources):
                demanding.append(node)
                choices[node.name] = [w for w in self._workers if _suits(node, w, w.resources)]

        def urgency(node: PlannedNode) -> tuple[int, float]:
            return len(choices[node.name]), -sum((node.resources or {}).values())

        for node in sorted(demanding, key=urgency):
            suiting = [w for w in choices[node.name] if _suits(node, w, self.free[w.address])]
            if not suiting:
                raise PlacementError(_explain(node, self._workers, self.free))

            def fullness(worker: WorkerInfo, node: PlannedNode = node) -> tuple[float, int]:
                nbytes = self._near.get(node.name, {}).get(worker.address, 0)
                return self._load[worker.address] / worker.nthreads, -nbytes

            self.put(node, min(suiting, key=fullness))

    def share_out(self, kind: str, members: Sequence[PlannedNode]) -> None:
        """Give each worker its share of the nodes of a kind, in blocks of neighbours.

        What is left once shares are rounded down goes to workers whose share was rounded: to those that
        have the fewest nodes of other kinds.
        """
        unplaced = [node for node in members if node.name not in self.placed]
        present = self._load_by_kind.setdefault(kind, Counter())
        count = len(unplaced) + present.total()
        threads = sum(worker.nthreads for worker in self._workers)
        shares = {w.address: count * w.nthreads // threads for w in self._workers}

        def fullness(worker: WorkerInfo) -> float:
            address = worker.address
            load_by_others = self._load[address] - present[address]
            return (load_by_others + shares[address]) / worker.nthreads

        rounded = [w for w in self._workers if count * w.nthreads % threads]
        for worker in sorted(rounded, key=fullness)[: count - sum(shares.values())]:
            shares[worker.address] += 1
        unplaced = self._place_near(unplaced, shares, present)
        for worker in self._workers:
            missing = max(0, shares[worker.address] - present[worker.address])
            block, unplaced = unplaced[:missing], unplaced[missing:]
            for node in block:
                self.put(node, worker)

    def _place_near(
        self, nodes: Sequence[PlannedNode], shares: Mapping[str, int], present: Counter[str]
    ) -> list[PlannedNode]:
        """Place nodes where their bytes lie, the largest first; returns those that are left."""
        by_address = {worker.address: worker for worker in self._workers}
        wishes: list[tuple[int, PlannedNode, WorkerInfo]] = []
        for node in nodes:
            for address, nbytes in self._near.get(node.name, {}).items():
                if address in by_address:
                    wishes.append((nbytes, node, by_address[address]))
        for _, node, worker in sorted(wishes, key=lambda wish: -wish[0]):
            has_room = present[worker.address] < shares[worker.address]
            if has_room and node.name not in self.placed:
                self.put(node, worker)
        return [node for node in nodes if node.name not in self.placed]

    def put(self, node: PlannedNode, worker: WorkerInfo) -> None:
        """Place a node."""
        self.placed[node.name] = worker.address
        self.count(node.kind, worker.address)
        for resource, amount in (node.resources or {}).items():
            self.free[worker.address][resource] -= amount

    def count(self, kind: str, address: str) -> None:
        """Count a node of a kind as load of a worker."""
        self._load[address] += 1
        self._load_by_kind.setdefault(kind, Counter())[address] += 1


def _suits(node: PlannedNode, worker: WorkerInfo, free: Mapping[str, float]) -> bool:
    """Whether a node may be on a worker that has these resources left."""
    if node.workers is not None and not any(map(worker.has_alias, node.workers)):
        return False
    needs = node.resources or {}
    return all(free.get(resource, 0) >= amount for resource, amount in needs.items())


def within_reach(
    workers: Sequence[WorkerInfo], cuts: Collection[frozenset[str]]
) -> list[list[WorkerInfo]]:
    """Return groups of workers that reach each other; `cuts` are pairs that do not.

    The group with most threads comes first; the others are for nodes that it does not suit.
    """
    unreachable: dict[str, set[str]] = {worker.address: set() for worker in workers}
    for first, second in map(tuple, cuts):
        if first in unreachable and second in unreachable:
            unreachable[first].add(second)
            unreachable[second].add(first)
    sides: list[list[WorkerInfo]] = []
    on_sides: set[str] = set()
    for worker in workers:
        if worker.address not in on_sides:
            side = {worker.address}
            # First those with the fewest cuts, which shut out the fewest others.
            for address in sorted(unreachable, key=lambda address: len(unreachable[address])):
                if not unreachable[address] & side:
                    side.add(address)
            on_sides |= side
            sides.append([w for w in workers if w.address in side])
    return sorted(sides, key=lambda side: -sum(w.nthreads for w in side))


def check_fit(
    sizes: Mapping[str, int],
    placement: Mapping[str, str],
    limits: Mapping[str, int],
    share: float,
    subject: str,
) -> None:
    """Raise a `PlacementError` if blobs of those sizes, by node, would exceed a worker's memory.

    Workers may use that share of their limits, which are by address; 0 means without limit.
    """
    by_worker: dict[str, dict[str, int]] = {}
    for node, size in sizes.items():
        by_worker.setdefault(placement[node], {})[node] = size
    full: dict[str, float] = {}  # workers that would exceed it
    for address, on_it in by_worker.items():
        most_bytes = share * limits.get(address, 0)
        if 0 < most_bytes < sum(on_it.values()):
            full[address] = sum(on_it.values()) / most_bytes
    if full:
        worst = max(full, key=full.__getitem__)
        nodes = by_worker[worst]
        raise PlacementError(
            f"{subject} does not fit: it would fill {len(full)} of {len(by_worker)} workers beyond "
            f"{share:.0%} of their memory. The fullest is {worst}, with "
            f"{format_bytes(sum(nodes.values()))} in "
            f"{len(nodes)} nodes and a limit of {format_bytes(limits[worst])}: {largest(nodes)}. "
            f"Start more workers or workers with more memory, or place the nodes differently "
            f"(Node(workers=...)), and run the same command again."
        )


def _explain(
    node: PlannedNode, workers: Sequence[WorkerInfo], free: Mapping[str, Mapping[str, float]]
) -> str:
    wishes = []
    if node.workers:
        wishes.append(f"workers {list(node.workers)}")
    if node.resources:
        wishes.append(f"resources {dict(node.resources)}")
    lines = []
    for worker in workers:
        offered = f"resources {dict(worker.resources) or 'none'}"
        if worker.resources:
            offered += f", of which free {dict(free[worker.address])}"
        lines.append(f"{worker.address} (name {worker.name!r}, host {worker.host}, {offered})")
    return (
        f"No worker suits node {node.name!r}: it requires {' and '.join(wishes)}, and the "
        f"{len(workers)} workers are: {listed(lines, 10, '; ')}. Start a suitable worker, or change "
        f"what Node({node.name!r}) requires."
    )
