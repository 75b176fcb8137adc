"""Sessions: run tasks on the workers of a Dask cluster, and keep workspaces there."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Self

from distributed import Client

from jobrunner.cluster.arrivals import Arrivals
from jobrunner.cluster.binding import RELEASE_SECONDS, Binding
from jobrunner.cluster.collections import BlobOfNodes
from jobrunner.cluster.connection import Connection, OwnCluster
from jobrunner.compile import GroupPlan, Plan, PlannedNode, planned_nodes
from jobrunner.define import Blob, Count, Natural, Task, TaskGroup, TaskOutput, checked
from jobrunner.errors import BlobNotFoundError, DefinitionError, ExecutionError
from jobrunner.texts import counted, listed, printable

if TYPE_CHECKING:
    from dask.array import Array
    from dask.dataframe import DataFrame

DEFAULT_WAIT_SECONDS = 60.0
HURRIED_RELEASE_SECONDS = 0.3
"""How long workers may take to release a session after Ctrl-C."""

_CLIENT = (
    "a Client of dask.distributed (Session.local() starts a cluster, Session.connect() joins one)"
)


class Session:
    """Runs groups of tasks on the workers of a Dask cluster, and keeps nodes' workspaces there.

    Parameters
    ----------
    client : distributed.Client
        Of any cluster; not on its event loop. It stays open when the session closes.

    Raises
    ------
    DefinitionError
        `client` is not a client, or asynchronous.
    ExecutionError
        The client is closed.

    Notes
    -----
    Runs on the client; one operation at a time. Workspaces live until the next job runs in the
    session, until `close`, or until the client goes away.

    Examples
    --------
    >>> from jobrunner import Node, Task
    >>> with Session.local(workers=1, processes=False) as session:
    ...     session.run(Task(lambda: 6 * 7, node=Node("a")))
    42
    """

    @checked
    def __init__(self, client: Annotated[Client, _CLIENT]) -> None:
        self._connection = Connection(client)
        if client.asynchronous:
            raise DefinitionError(
                "A session blocks while tasks run, so it cannot use an asynchronous client on its event "
                "loop. Make the Client and the Session in a thread: asyncio.to_thread(...)."
            )
        self._connection.scheduler.check_open()
        self._address = str(client.scheduler.address)  # type: ignore[union-attr]  # it is open
        self._id = secrets.token_hex(6)
        self._lock = threading.Lock()
        self._runner: tuple[str, int] | None = None  # what runs, and its thread
        self._binding: Binding | None = None
        self._last_binding: Binding | None = None  # even if it failed or is released
        self._num_bindings = 0
        self._arrivals: Arrivals | None = None
        self._is_closed = False
        self._release_seconds = RELEASE_SECONDS

    @classmethod
    @checked
    def local(
        cls,
        workers: Count | None = None,
        threads_per_worker: Count | None = None,
        processes: bool = True,
    ) -> Self:
        """Start a cluster on this machine, for this session.

        Parameters
        ----------
        workers, threads_per_worker : int, optional
            By default, Dask chooses them for this machine.
        processes : bool
            Workers are processes, or threads of this process. Ctrl-C affects only the client.

        Raises
        ------
        DefinitionError, ExecutionError
            `workers` or `threads_per_worker` is not a positive int; the workers did not start.
        """
        cluster = OwnCluster(workers, threads_per_worker, processes)
        return cls._over(Connection(cluster.client, cluster=cluster))

    @classmethod
    @checked
    def connect(cls, address: str, **client_kwargs: Any) -> Self:
        """Connect to a cluster's scheduler.

        Parameters
        ----------
        address : str
            As in ``Client(address)``.
        **client_kwargs
            For `Client`; not the default client unless ``set_as_default=True``.

        Raises
        ------
        DefinitionError, ExecutionError
            `address` is not an address; no scheduler answers there.
        """
        return cls._over(Connection.to(address, **client_kwargs))

    @classmethod
    def _over(cls, connection: Connection) -> Self:
        try:
            session = cls(connection.client)
        except BaseException:
            connection.kill()
            connection.close()
            raise
        session._connection = connection  # which also closes what was opened here
        return session

    @property
    def client(self) -> Client:
        """The client; `reconnect` may replace it."""
        return self._connection.client

    # ---- for users

    @checked
    def run(
        self,
        task_or_group: Annotated[
            Task | TaskGroup, "a Task or a TaskGroup (JobRunner(job).run(session) runs a Job)"
        ],
    ) -> Any:
        """Run a task or a group of tasks on the current workspaces.

        Parameters
        ----------
        task_or_group : Task or TaskGroup
            It must not belong to a job. A task must be alone in its group, or have none. Nodes that
            are new to the session are placed first.

        Returns
        -------
        object
            For a task, its output's value, or a tuple if it has several. None for a group.

        Raises
        ------
        DefinitionError, PlacementError, TaskFailedError, NodeLostError
        BlobNotFoundError
            A blob that is read neither exists nor is made in the group.

        Notes
        -----
        Runs on the client. A blob that a task makes is private to the run, unless the node has a
        global blob of that name or the task or group is marked ``WorkspaceType.GLOBAL``.
        """
        if isinstance(task_or_group, TaskGroup):
            self.run_group(task_or_group)
            return None
        task = task_or_group
        if task.group is None:
            TaskGroup().add(task)
        assert task.group is not None
        if len(task.group.tasks()) > 1:
            raise DefinitionError(
                f"Task {task.full_name!r} is one of {len(task.group.tasks())} in its group. Run "
                f"the group, or define the task outside any group."
            )
        outputs = task.outputs()
        with self._operation(f"run of task {task.full_name!r}"):
            self.run_group(task.group)
            values = tuple(self._fetch_output(output) for output in outputs)
        if len(values) == 1:
            return values[0]
        return values

    @checked
    def fetch(self, blob_or_output: Blob | TaskOutput) -> Any:
        """Bring a value to the client, as a copy.

        Parameters
        ----------
        blob_or_output : Blob or TaskOutput
            A blob must name its node. A task's output has its value of its group's last run.

        Raises
        ------
        BlobNotFoundError, ExecutionError
            The blob, its node or the task's value does not exist.
        """
        with self._operation("fetch"):
            if isinstance(blob_or_output, TaskOutput):
                return self._fetch_output(blob_or_output)
            if not isinstance(blob_or_output, Blob) or blob_or_output.node is None:
                raise DefinitionError(
                    f"fetch takes a TaskOutput or a Blob with its node; got {blob_or_output!r}. "
                    f"Write node['name'], or task.output()."
                )
            node = blob_or_output.node.name
            return self._holder_of(node, blob_or_output.name).fetch(node, blob_or_output.name)

    @checked
    def array(
        self, blob: str, nodes: Collection[str] | None = None, axis: Natural | None = None
    ) -> Array:
        """Return a blob of several nodes as one `dask.array.Array`, as it is now.

        Parameters
        ----------
        blob : str
            A global blob, whose values are arrays or numbers of one dtype.
        nodes : collection of str, optional
            By default all that have the blob, in the order in which the plan has them.
        axis : int, optional
            Join the values along this axis. By default the parts of a partitioned blob along its
            axis, and other values, which must have one shape, along a new first axis.

        Returns
        -------
        dask.array.Array
            Its data stay on the workers, where they are shared with the blobs, and are not changed by
            what tasks do later. Neighbours make up chunks of at most 64 MiB; a larger value is a chunk
            of its own. It outlives the session, but fails if a worker that holds a part dies.

        Raises
        ------
        BlobNotFoundError
            A node lacks the blob.
        DefinitionError
            The values differ in dtype or shape; the message names the first two.
        """
        with self._operation("making of a Dask array"):
            return self._blob_of(blob, nodes).array(axis)

    @checked
    def frame(self, blob: str, nodes: Collection[str] | None = None) -> DataFrame:
        """Return a blob of several nodes, data frames or series, as one `dask.dataframe.DataFrame`.

        Parameters
        ----------
        blob, nodes
            As of `array`; the values must have the same columns and dtypes.

        Returns
        -------
        dask.dataframe.DataFrame
            Of copies, on the workers; the rest is as of `array`. Divisions are unknown.

        Raises
        ------
        BlobNotFoundError
            A node lacks the blob.
        DefinitionError
            A value is no data frame, or they differ; the message names the first two.
        """
        with self._operation("making of a Dask data frame"):
            return self._blob_of(blob, nodes).frame()

    def close(self) -> None:
        """Free the session's data on the workers; close the client and cluster that it opened."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._arrivals is not None:
            self._arrivals.release()
        try:
            if self._binding is not None:
                self._binding.release(self._release_seconds)
        except KeyboardInterrupt:
            self._connection.kill()
            raise
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            # A task that does not return must not make a user press Ctrl-C again.
            self._connection.kill()
            self._release_seconds = HURRIED_RELEASE_SECONDS
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return printable(f"<closed Session of {self._address}>")
        nodes = 0
        if self._binding is not None:
            nodes = len(self._binding.placement)
        return printable(f"<Session of {self._address}: {counted(nodes, 'node')}>")

    # ---- for runners

    def bind(
        self,
        plan: Plan,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
        *,
        can_move: bool = False,
        stays: bool = False,
        wanted_workers: int = 0,
        first: GroupPlan | None = None,
    ) -> Binding:
        """Place a plan's nodes on workers, with empty workspaces, and drop the previous binding.

        With `stays`, nodes stay on their workers if these still exist. With `can_move`, the caller binds
        again when `Binding.leaving` names a worker, which waits for that. Raises a `PlacementError`
        if no suitable workers are there within `wait_seconds`. A cluster that adapts is asked for
        `wanted_workers`, if there are as many nodes. `first` is the group to run first: the
        collections among its arguments are computed before workers are reserved.
        """
        with self._operation(f"job {plan.job!r}"):
            self._num_bindings += 1
            name = f"{self._id}-{self._num_bindings}"
            before, self._binding = self._last_binding, None
            if before is not None:
                before.release()
            scheduler = self._connection.scheduler
            self._arrivals = Arrivals(scheduler, plan.job, wait_seconds, self._arrivals)
            if first is not None:
                self._arrivals.compute(first)
            binding = self._last_binding = Binding(
                scheduler, name, plan, before, self._arrivals, can_move=can_move, stays=stays
            )
            try:
                binding.extend(plan.nodes, wait_seconds, wanted_workers)
                binding.check_fit(self._arrivals.sizes, "What Dask has computed for init tasks")
                binding.ship(plan.groups)
            except BaseException:
                binding.release()
                raise
            self._binding = binding
            return binding

    def run_group(
        self, group: TaskGroup, epoch: int | None = None, deadline_seconds: float | None = None
    ) -> None:
        """Run a group that belongs to no job on the current workspaces; see `run`."""
        with self._operation(f"run of the {group.name} group"):
            binding = self._extend(planned_nodes([group]))
            binding.run_alone(group, epoch, deadline_seconds)
            for task in group.tasks():
                task.session, task.plan = self, binding.plan

    @property
    def is_connected(self) -> bool:
        """Whether the client has a scheduler, as far as it knows."""
        return bool(self.client.status == "running")

    def reconnect(self, wait_seconds: float) -> None:
        """Wait until a lost scheduler is back at its address; its workers return later.

        The session's data on the cluster are gone; bind again. Raises `SchedulerLostError` if the
        scheduler is not back in time, or if the client was closed and the session did not open it.
        """
        if self._binding is not None:
            binding, self._binding = self._binding, None
            binding.release()
        self._connection.reconnect(self._address, wait_seconds)

    @contextmanager
    def exclusive(self, activity: str) -> Iterator[None]:
        """Reserve the session for one runner; `ExecutionError` if another one runs in it."""
        with self._lock:
            if self._runner is not None:
                raise ExecutionError(
                    f"{activity} cannot start: {self._runner[0]} runs in this session, and a session "
                    f"has one runner at a time. Wait until it ends, or make another session of the "
                    f"same client."
                )
            self._runner = (activity, threading.get_ident())
        try:
            yield
        finally:
            self._runner = None

    @contextmanager
    def _operation(self, activity: str) -> Iterator[None]:
        if self._is_closed:
            raise ExecutionError(
                f"The {activity} cannot start: this session is closed. Make a new one; workspaces end with their "
                f"session."
            )
        if self._runner is not None and self._runner[1] == threading.get_ident():
            yield  # a part of what the runner does
            return
        with self.exclusive(f"The {activity}"):
            yield

    def _extend(self, nodes: Sequence[PlannedNode]) -> Binding:
        """Return the session's binding, after placing nodes that it lacks."""
        binding = self._binding
        if binding is None:
            binding = self.bind(_EMPTY_PLAN)
        new = [node for node in nodes if node.name not in binding.placement]
        if new:
            binding.extend(new, DEFAULT_WAIT_SECONDS)
        return binding

    def _fetch_output(self, output: TaskOutput) -> Any:
        task = output.task
        if task.group is None:
            raise ExecutionError(f"{output} has no value: its task has not run.")
        return self._holder_of(task.node.name, task.name).fetch_output(output)

    def _blob_of(self, blob: str, nodes: Collection[str] | None) -> BlobOfNodes:
        if self._binding is None:
            raise BlobNotFoundError(f"No {blob!r}: this session has no nodes. Run a job first.")
        return BlobOfNodes(self._connection.scheduler, self._binding, blob, nodes)

    def _holder_of(self, node: str, name: str) -> Binding:
        nodes: Collection[str] = ()
        if self._binding is not None:
            nodes = self._binding.placement
            if node in nodes:
                return self._binding
        raise BlobNotFoundError(
            f"No {name!r} of node {node!r}: the session's nodes are {listed(map(repr, nodes))}. "
            f"Check the name, or run a task on that node first."
        )


_EMPTY_PLAN = Plan("session", 0, 1, None, nodes=(), groups={}, checkpointed=(), globals={})
