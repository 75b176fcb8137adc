"""A binding's leases: Dask tasks that reserve its workers and their resources."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import wait

from jobrunner.cluster.members import Members
from jobrunner.cluster.messages import FIRST_WAIT_SECONDS
from jobrunner.cluster.messenger import Messenger
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.compile import PlannedNode
from jobrunner.errors import PlacementError
from jobrunner.worker import Failure, lease_key, run_lease


class Leases:
    """The leases of one binding."""

    def __init__(
        self, scheduler: SchedulerLink, name: str, members: Members, messenger: Messenger
    ) -> None:
        self._scheduler = scheduler
        self._name = name
        self._members = members
        self._messenger = messenger

    def take(
        self,
        nodes: Sequence[PlannedNode],
        placed: Mapping[str, str],
        deadline: float,
        details: Mapping[str, Any],
    ) -> None:
        """Take leases for placed nodes, and let their workers host the binding.

        `details` describe the binding. Raises a `PlacementError` if some lease tasks have not
        started at monotonic time `deadline`.
        """
        needs: dict[str, dict[str, float]] = {address: {} for address in placed.values()}
        for node in nodes:
            need = needs[placed[node.name]]
            for resource, amount in (node.resources or {}).items():
                need[resource] = need.get(resource, 0) + amount
        late = self._messenger.sync(self._bind, self._submit(needs), deadline, details)
        if late:
            raise self._give_up(late, needs)

    def release(self, wait_seconds: float) -> None:
        """End all leases."""
        workers = self._members.workers
        alive = [lease for a in self._members.alive for lease in workers[a].leases]
        pending = [lease for lease in alive if lease.status == "pending"]
        if pending and self._scheduler.client.status == "running":
            # Otherwise a worker that closes soon warns of an interrupted task.
            with suppress(Exception):
                wait(pending, timeout=wait_seconds)
        for worker in workers.values():
            for lease in worker.leases:
                lease.release()
            worker.leases.clear()

    def _submit(self, needs: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Submit the lease tasks; returns address -> key."""
        keys: dict[str, str] = {}
        for address, need in needs.items():
            worker = self._members.workers[address]
            if worker.leases and not need:
                continue  # another lease is needed only for more resources
            key = keys[address] = lease_key(self._name, worker.incarnation, len(worker.leases))
            worker.leases.append(
                self._scheduler.client.submit(
                    run_lease,
                    key,
                    key=key,
                    workers=[address],
                    allow_other_workers=False,
                    resources=need,
                    pure=False,
                )
            )
        return keys

    async def _bind(
        self, keys: dict[str, str], deadline: float, details: Mapping[str, Any]
    ) -> list[str]:
        """Wait until lease tasks run and their workers host the binding; returns the late ones."""
        waiting = list(keys)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            wait_seconds = min(FIRST_WAIT_SECONDS, left)
            replies = await self._messenger.query(
                "bind", waiting, leases=keys, wait_seconds=wait_seconds, **details
            )
            for reply in replies.values():
                if reply["status"] == "failed":
                    raise Failure(**reply["failure"]).exception()
            waiting = [address for address in waiting if replies[address]["status"] != "done"]
            if not left:
                break
        return waiting

    def _give_up(
        self, late: Sequence[str], needs: Mapping[str, Mapping[str, float]]
    ) -> PlacementError:
        """Release the leases that did not start in time; returns the error to raise."""
        workers = self._members.workers
        for address in late:
            workers[address].leases.pop().release()
        offers = "; ".join(
            f"{address} offers {dict(workers[address].info.resources) or 'none'}, requested: "
            f"{needs[address] or 'none'}"
            for address in late
        )
        return PlacementError(
            f"Workers did not start this session's lease tasks in time. They are paused or "
            f"closing, or other sessions or tasks use their resources: {offers}. Close these, "
            f"start more workers, or wait longer."
        )
