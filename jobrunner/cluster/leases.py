"""4 run: a binding's leases, the tasks of Dask's that hold its workers and their resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from distributed import wait

from jobrunner.cluster.members import Membership
from jobrunner.cluster.workers import Cluster
from jobrunner.compile import PlannedNode
from jobrunner.errors import PlacementError
from jobrunner.worker import hold_lease, lease_key


class Leases:
    """The leases of one binding.

    Parameters
    ----------
    cluster : Cluster
    name : str
        The binding's.
    members : Membership
    """

    def __init__(self, cluster: Cluster, name: str, members: Membership) -> None:
        self._cluster = cluster
        self._name = name
        self._members = members

    def take(self, nodes: Sequence[PlannedNode], placed: Mapping[str, str]) -> dict[str, str]:
        """Submit what holds the workers, and what the nodes ask of their resources.

        Returns
        -------
        dict of str to str
            Address -> key of the lease task there.
        """
        keys: dict[str, str] = {}
        for address, need in _needs(nodes, placed).items():
            worker = self._members.workers[address]
            if worker.leases and not need:
                continue  # a further lease is for further resources only
            key = keys[address] = lease_key(self._name, worker.incarnation, len(worker.leases))
            worker.leases.append(
                self._cluster.client.submit(
                    hold_lease,
                    key,
                    key=key,
                    workers=[address],
                    allow_other_workers=False,
                    resources=need,
                    pure=False,
                )
            )
        return keys

    def give_up(
        self, late: Sequence[str], nodes: Sequence[PlannedNode], placed: Mapping[str, str]
    ) -> PlacementError:
        """Release the leases that did not start in time; gives the error that says so."""
        needs = _needs(nodes, placed)
        for address in late:
            self._members.workers[address].leases.pop().release()
        offers = "; ".join(
            f"{address} offers {dict(self._members.workers[address].info.resources) or 'none'}, "
            f"of which {needs[address] or 'none'} was asked for"
            for address in late
        )
        return PlacementError(
            f"Workers did not start this session's lease tasks in time. They are paused or "
            f"closing, or others hold their resources: {offers}. Close what holds them, start "
            f"more workers, or wait longer."
        )

    def release(self, wait_seconds: float) -> None:
        """End them all."""
        workers = self._members.workers
        alive = [lease for a in self._members.alive for lease in workers[a].leases]
        pending = [lease for lease in alive if lease.status == "pending"]
        if pending and self._cluster.client.status == "running":
            # Or a worker that closes right after this would warn of a task cut short.
            with suppress(Exception):
                wait(pending, timeout=wait_seconds)
        for worker in workers.values():
            for lease in worker.leases:
                lease.release()
            worker.leases.clear()


def _needs(nodes: Sequence[PlannedNode], placed: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """What the nodes ask of each worker's resources."""
    needs: dict[str, dict[str, float]] = {address: {} for address in placed.values()}
    for node in nodes:
        need = needs[placed[node.name]]
        for resource, amount in (node.resources or {}).items():
            need[resource] = need.get(resource, 0) + amount
    return needs
