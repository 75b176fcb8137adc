"""The workers that a binding uses: their nodes and running tasks, and which are lost. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.cluster.placement import WorkerInfo
from jobrunner.errors import NodeLostError


@dataclass(slots=True)
class Member:
    """A worker in use by a binding."""

    info: WorkerInfo
    incarnation: str
    leases: list[Any] = field(default_factory=list)  # futures of Dask


class Members:
    """The workers that one binding uses, by address."""

    def __init__(self, placement: Mapping[str, str]) -> None:
        self.placement = placement  # node -> address; the binding adds to it
        self.workers: dict[str, Member] = {}
        self.lost: dict[str, str] = {}  # causes
        # Lost workers that the scheduler still has, but another worker could not send values to.
        self.cut: set[str] = set()
        self.leaving: dict[str, str] = {}  # causes; these workers serve until they leave
        self.excused: set[str] = set()  # failed to answer once, perhaps because they leave
        self.running: dict[str, list[tuple[str, str]]] = {}  # (node, task) at the last answer

    @property
    def alive(self) -> list[str]:
        """Addresses of the workers that are not lost."""
        return [address for address in self.workers if address not in self.lost]

    def running_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The tasks that run on some workers, as ``node/task``."""
        running = dict(self.running)
        return tuple(f"{node}/{task}" for a in addresses for node, task in running.get(a, ()))

    def nodes_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The nodes on some workers."""
        return tuple(node for node, address in self.placement.items() if address in addresses)

    def error(self, epoch: int | None) -> NodeLostError:
        """The error that names the lost workers."""
        lost = dict(self.lost)
        # A worker that is only unreachable was not killed by a task.
        died = [address for address in lost if address not in self.cut]
        when = f" at epoch {epoch}" if epoch is not None else ""
        each = [self._describe_loss(address, how) for address, how in lost.items()]
        who = f"worker {each[0]}" if len(each) == 1 else f"{len(each)} workers: {'; '.join(each)}"
        return NodeLostError(
            f"Lost{when}: {who}. The workspaces of their nodes are gone.",
            nodes=self.nodes_on(lost),
            worker=next(iter(lost)),
            epoch=epoch,
            running=self.running_on(died),
        )

    def _describe_loss(self, address: str, how: str) -> str:
        nodes = self.nodes_on([address])
        names = ", ".join(map(repr, nodes[:10])) + (", …" if len(nodes) > 10 else "")
        running = self.running_on([address])
        what = f" and ran {', '.join(running)}" if running else ""
        return f"{address}, which had {names or 'no nodes'}{what} ({how})"
