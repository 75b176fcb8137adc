"""Which worker holds which node. Pure.

Nodes that require particular workers or resources are placed first, those with the fewest choices
leading. The others fill the workers in proportion to their threads. Nodes defined one after another
share a worker where possible, because they exchange most values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jobrunner.compile import PlannedNode
from jobrunner.errors import PlacementError
from jobrunner.workspace import as_text, largest


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A Dask worker, as far as placing nodes needs it.

    Attributes
    ----------
    address, name, host : str
        What `Node.workers` may call it.
    nthreads : int
    resources : mapping
        What it offers in total, by name.
    limit_bytes : int
        The memory at which its nanny kills it; 0: no limit.
    """

    address: str
    name: str
    host: str
    nthreads: int
    resources: Mapping[str, float] = field(default_factory=dict)
    limit_bytes: int = 0

    def answers_to(self, alias: str) -> bool:
        """Whether Dask would take `alias` for this worker: address, name or host."""
        bare = self.address.partition("://")[2]
        return alias in (self.address, bare, self.name, self.host)


def place(
    nodes: Sequence[PlannedNode],
    workers: Sequence[WorkerInfo],
    previous: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Choose a worker for every node.

    Parameters
    ----------
    nodes : sequence of PlannedNode
        In order of first use.
    workers : sequence of WorkerInfo
        In an order of their own; the same arguments give the same placement.
    previous : mapping of str to str, optional
        Node -> address, for nodes that stay where they are if that worker is still among
        `workers` and still suits them. It may name other nodes too: they take up room.

    Returns
    -------
    dict of str to str
        Node -> address of its worker, in the order of `nodes`.

    Raises
    ------
    PlacementError
        Saying what was asked for and what there is.
    """
    if not workers:
        raise PlacementError(
            f"{len(nodes)} nodes were to be placed, and the cluster has no workers. Start some, "
            f"or wait for them longer."
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
    """Leave out workers until all that stay reach each other.

    Parameters
    ----------
    workers : sequence of WorkerInfo
    cuts : collection of frozenset of str
        Pairs of addresses of workers that don't reach each other.

    Returns
    -------
    list of list of WorkerInfo
        Groups of workers that reach each other, in the given order. The group with most threads is
        first; the others are for nodes that it does not suit.
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
            # Of several the last, so that the same workers give the same placement.
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
    """Refuse to fill workers beyond what they may use.

    Parameters
    ----------
    sizes : mapping of str to int
        Node -> bytes that its blobs take at least.
    placement : mapping of str to str
        Node -> address of its worker.
    limits : mapping of str to int
        Address -> bytes at which the worker is killed; 0: never.
    share : float
        Of the limit that may be used; 0: whatever.
    what : str
        What would fill them, for the message.

    Raises
    ------
    PlacementError
        Naming the worker that is filled most, its nodes, and what to do.
    """
    by_worker: dict[str, dict[str, int]] = {}
    for node, size in sizes.items():
        by_worker.setdefault(placement[node], {})[node] = size
    full = {
        address: sum(its.values()) / (share * limits[address])
        for address, its in by_worker.items()
        if share * limits.get(address, 0)
    }
    worst = max(full, key=full.__getitem__, default="")
    if worst and full[worst] > 1:
        its = by_worker[worst]
        over = sum(1 for filled in full.values() if filled > 1)
        raise PlacementError(
            f"{what} does not fit: of {len(full)} workers {over} would be filled beyond "
            f"{share:.0%} of their memory. Most of all {worst}, with "
            f"{as_text(sum(its.values()))} in {len(its)} nodes and a limit of "
            f"{as_text(limits[worst])}: {largest(its)}. Start more workers or ones with more "
            f"memory, or place the nodes otherwise (Node(workers=...)), and run the same command "
            f"again."
        )


def _fits(node: PlannedNode, worker: WorkerInfo, free: Mapping[str, float]) -> bool:
    return (node.workers is None or any(map(worker.answers_to, node.workers))) and all(
        free.get(resource, 0) >= amount for resource, amount in (node.resources or {}).items()
    )


def _shares(count: int, workers: Sequence[WorkerInfo], load: Mapping[str, int]) -> dict[str, int]:
    """How many of `count` nodes each worker takes, so that nodes per thread come out even."""
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
    lines = [
        f"{worker.address} (name {worker.name!r}, host {worker.host}, "
        f"resources {dict(worker.resources) or 'none'}"
        + (f", of which free {dict(free[worker.address])}" if worker.resources else "")
        + ")"
        for worker in workers[:10]
    ]
    more = f" and {len(workers) - 10} more" if len(workers) > 10 else ""
    return (
        f"No worker suits node {node.name!r}: it asks for {' and '.join(asked)}; there are "
        f"{len(workers)} workers: {'; '.join(lines)}{more}. Start a worker that suits, or change "
        f"what Node({node.name!r}) asks for."
    )
