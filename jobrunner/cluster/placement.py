"""Chooses a worker for each node. Pure.

Nodes that require particular workers or resources are placed first, in order of the number of
choices. The others fill the workers in proportion to their threads. Nodes defined one after another
share a worker if possible, because they exchange most values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jobrunner.compile import PlannedNode
from jobrunner.config import largest
from jobrunner.errors import PlacementError
from jobrunner.texts import counted, format_bytes, listed


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
) -> dict[str, str]:
    """Choose a worker for every node; returns addresses by node, in the order of `nodes`.

    Nodes in `previous` stay on these workers if they still suit; other nodes there count as load.
    The same arguments give the same placement. Raises a `PlacementError` if no worker suits a node.
    """
    if not workers:
        raise PlacementError(
            f"The cluster has no workers for {counted(len(nodes), 'node')}. Start some, or wait longer "
            f"for them."
        )
    table = {worker.address: worker for worker in workers}
    free = {worker.address: dict(worker.resources) for worker in workers}
    load = dict.fromkeys(table, 0)
    placed: dict[str, str] = {}

    def take(node: PlannedNode, address: str) -> None:
        placed[node.name] = address
        load[address] += 1
        for resource, amount in (node.resources or {}).items():
            free[address][resource] -= amount

    wanted = {node.name for node in nodes}
    for name, address in (previous or {}).items():
        if name not in wanted and address in load:
            load[address] += 1
    for node in nodes:
        address = (previous or {}).get(node.name, "")
        if address in table and _fits(node, table[address], free[address]):
            take(node, address)

    rest = [node for node in nodes if node.name not in placed]
    demanding = [node for node in rest if node.workers or node.resources]
    choices = {
        node.name: [w for w in workers if _fits(node, w, dict(w.resources))] for node in demanding
    }
    for node in sorted(
        demanding, key=lambda n: (len(choices[n.name]), -sum((n.resources or {}).values()))
    ):
        fitting = [w for w in choices[node.name] if _fits(node, w, free[w.address])]
        if not fitting:
            raise PlacementError(_explain(node, workers, free))
        take(node, min(fitting, key=lambda w: load[w.address] / w.nthreads).address)

    easy = [node for node in rest if node.name not in placed]
    for address, count in _shares(len(easy), workers, load).items():
        for node in easy[:count]:
            take(node, address)
        easy = easy[count:]
    return {node.name: placed[node.name] for node in nodes}


def within_reach(
    workers: Sequence[WorkerInfo], cuts: Collection[frozenset[str]]
) -> list[list[WorkerInfo]]:
    """Return groups of workers that reach each other; `cuts` are pairs that do not.

    The group with most threads comes first; the others are for nodes that it does not suit.
    """
    apart: dict[str, set[str]] = {worker.address: set() for worker in workers}
    for one, other in map(tuple, cuts):
        if one in apart and other in apart:
            apart[one].add(other)
            apart[other].add(one)
    sides: list[list[WorkerInfo]] = []
    seen: set[str] = set()
    for worker in workers:
        if worker.address in seen:
            continue
        side = apart.keys() - apart[worker.address]
        while most := max((len(apart[address] & side) for address in side), default=0):
            # If several have as many cuts, remove the last, so that the result is reproducible.
            side.remove([a for a in apart if a in side and len(apart[a] & side) == most][-1])
        seen |= side
        sides.append([w for w in workers if w.address in side])
    return sorted(sides, key=lambda side: -sum(w.nthreads for w in side))


def check_fit(
    sizes: Mapping[str, int],
    placement: Mapping[str, str],
    limits: Mapping[str, int],
    share: float,
    what: str,
) -> None:
    """Raise a `PlacementError` if blobs of those sizes, by node, would exceed a worker's memory.

    Workers may use that share of their limits, which are by address; 0 means without limit.
    """
    by_worker: dict[str, dict[str, int]] = {}
    for node, size in sizes.items():
        by_worker.setdefault(placement[node], {})[node] = size
    full = {
        address: sum(on_it.values()) / (share * limits[address])
        for address, on_it in by_worker.items()
        if share * limits.get(address, 0)
    }
    worst = max(full, key=full.__getitem__, default="")
    if worst and full[worst] > 1:
        nodes = by_worker[worst]
        over = sum(1 for filled in full.values() if filled > 1)
        raise PlacementError(
            f"{what} does not fit: it would fill {over} of {len(full)} workers beyond {share:.0%} "
            f"of their memory. The fullest is {worst}, with {format_bytes(sum(nodes.values()))} in "
            f"{len(nodes)} nodes and a limit of {format_bytes(limits[worst])}: {largest(nodes)}. "
            f"Start more workers or workers with more memory, or place the nodes differently "
            f"(Node(workers=...)), and run the same command again."
        )


def _fits(node: PlannedNode, worker: WorkerInfo, free: Mapping[str, float]) -> bool:
    return (node.workers is None or any(map(worker.has_alias, node.workers))) and all(
        free.get(resource, 0) >= amount for resource, amount in (node.resources or {}).items()
    )


def _shares(count: int, workers: Sequence[WorkerInfo], load: Mapping[str, int]) -> dict[str, int]:
    """How many of `count` nodes each worker gets, so that nodes per thread are even."""
    total = count + sum(load.values())
    threads = sum(worker.nthreads for worker in workers)
    ideal = {w.address: max(0.0, total * w.nthreads / threads - load[w.address]) for w in workers}
    scale = count / (sum(ideal.values()) or 1)
    shares = {address: int(share * scale) for address, share in ideal.items()}
    by_remainder = sorted(ideal, key=lambda a: shares[a] - ideal[a] * scale)
    for address in by_remainder[: count - sum(shares.values())]:
        shares[address] += 1
    return shares


def _explain(
    node: PlannedNode, workers: Sequence[WorkerInfo], free: Mapping[str, Mapping[str, float]]
) -> str:
    asked = []
    if node.workers:
        asked.append(f"workers {list(node.workers)}")
    if node.resources:
        asked.append(f"resources {dict(node.resources)}")
    lines = (
        f"{worker.address} (name {worker.name!r}, host {worker.host}, "
        f"resources {dict(worker.resources) or 'none'}"
        + (f", of which free {dict(free[worker.address])}" if worker.resources else "")
        + ")"
        for worker in workers
    )
    return (
        f"No worker suits node {node.name!r}: it requires {' and '.join(asked)}, and the "
        f"{len(workers)} workers are: {listed(lines, 10, '; ')}. Start a suitable worker, or change "
        f"what Node({node.name!r}) requires."
    )
