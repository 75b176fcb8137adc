"""The workers in use by a binding: what they hold and run, and which of them are lost. Pure."""

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
    """The workers in use by one binding.

    Parameters
    ----------
    placement : mapping of str to str
        Node -> address; the binding's own, which grows.

    Attributes
    ----------
    workers : dict of str to Member
        By address.
    lost : dict of str to str
        Address -> how we know.
    cut : set of str
        Lost workers that another worker could not send values to; the scheduler still has them.
    leaving : dict of str to str
        Address -> how we know, for workers that are about to leave and serve until then.
    excused : set of str
        Workers whose failure to answer was once excused because they leave.
    running : dict of str to list of (str, str)
        Address -> node and name of each task that ran there at the worker's last answer.
    """

    def __init__(self, placement: Mapping[str, str]) -> None:
        self.placement = placement
        self.workers: dict[str, Member] = {}
        self.lost: dict[str, str] = {}
        self.cut: set[str] = set()
        self.leaving: dict[str, str] = {}
        self.excused: set[str] = set()
        self.running: dict[str, list[tuple[str, str]]] = {}

    @property
    def alive(self) -> list[str]:
        """Addresses of the workers that are not known to be lost."""
        return [address for address in self.workers if address not in self.lost]

    def running_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The tasks that run on some workers, as ``node/task``."""
        running = dict(self.running)
        return tuple(f"{node}/{task}" for a in addresses for node, task in running.get(a, ()))

    def nodes_on(self, addresses: Collection[str]) -> tuple[str, ...]:
        """The nodes that some workers hold."""
        return tuple(node for node, address in self.placement.items() if address in addresses)

    def error(self, epoch: int | None) -> NodeLostError:
        """The error that names the lost workers."""
        lost = dict(self.lost)
        # A worker that is only unreachable did not die of a task.
        died = [address for address in lost if address not in self.cut]
        when = f" at epoch {epoch}" if epoch is not None else ""
        each = [self._describe_loss(address, how) for address, how in lost.items()]
        who = f"worker {each[0]}" if len(each) == 1 else f"{len(each)} workers: {'; '.join(each)}"
        return NodeLostError(
            f"Lost{when}: {who}. The workspaces of those nodes are gone.",
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
        return f"{address}, which held {names or 'no nodes'}{what} ({how})"
