"""Nodes, and references to the blobs of their workspaces."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Literal, Self

from jobrunner.define.array_options import ArrayOptions, read_array_options
from jobrunner.define.checks import NATURAL, Rule, checked, number
from jobrunner.errors import DefinitionError
from jobrunner.names import check_name


class Active:
    """Is active inside its ``with`` block."""

    _active: ClassVar[ContextVar[tuple[Any, ...]]]  # of each class, innermost last

    @classmethod
    def _innermost(cls) -> Self | None:
        """The active instance of this class, if any."""
        return next(reversed(cls._active.get()), None)

    def __enter__(self) -> Self:
        self._active.set((*self._active.get(), self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._active.set(self._active.get()[:-1])


class WorkspaceType(enum.Enum):
    """How long a task's output blobs live.

    GLOBAL blobs stay on their node across runs and epochs, and are checkpointed. PRIVATE blobs
    are released after each run of their group. By default a blob is global if the init group
    makes it.
    """

    GLOBAL = "global"
    PRIVATE = "private"


WorkspaceTypeName = Literal["global", "private"]


def as_workspace_type(value: object, where: str) -> WorkspaceType | None:
    """Return a `WorkspaceType`, or make one from its name; None stays None."""
    if value is None:
        return None
    try:
        return WorkspaceType(value)
    except ValueError:
        raise DefinitionError(
            f"{where}: workspace_type must be a WorkspaceType, 'global' or 'private'; got {value!r}."
        ) from None


def _are_workers(value: Any) -> bool:
    names = (value,) if isinstance(value, str) else value
    is_list = isinstance(names, Collection) and len(names) > 0
    return is_list and all(isinstance(name, str) for name in names)


_WORKERS = Rule("at least one address, name or host (str)", _are_workers)
_AMOUNT = number("a number > 0", lambda amount: 0 < amount < math.inf)


def _are_resources(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(name, str) and _AMOUNT.fits(value[name]) for name in value)


_RESOURCES = Rule("a mapping of names to positive numbers, as in Dask ({'GPU': 1})", _are_resources)
_AXIS = Rule("an axis (an int >= 0)", NATURAL.fits, NATURAL.read)


class Node(Active):
    """A logical place that tasks run on. It has one workspace, on one Dask worker at a time.

    Two `Node` objects of the same name are the same node.

    Parameters
    ----------
    name : str
    workers : str or sequence of str, optional
        Addresses, names or hosts of the workers it may run on, as in `Client.submit`.
    resources : mapping of str to float, optional
        The resources of its worker that it occupies, as in `Client.submit`.

    Examples
    --------
    >>> with Node("trainer:0") as node:
    ...     Node.current() is node
    True
    >>> node["w"]
    Blob('w', 'trainer:0')
    """

    _active = ContextVar("jobrunner_nodes", default=())

    @checked
    def __init__(
        self,
        name: str = "local",
        *,
        workers: Annotated[str | Sequence[str], _WORKERS] | None = None,
        resources: Annotated[Mapping[str, float], _RESOURCES] | None = None,
    ) -> None:
        self.name = check_name(name, "node")
        self.workers: tuple[str, ...] | None = None
        if isinstance(workers, str):
            self.workers = (workers,)
        elif workers is not None:
            self.workers = tuple(workers)
        self.resources: Mapping[str, float] | None = None
        if resources is not None:
            self.resources = dict(resources)

    @classmethod
    def current(cls) -> Node:
        """The node of the innermost ``with`` block, else ``Node("local")``."""
        return cls._innermost() or cls()

    def __getitem__(self, name: str) -> Blob:
        return Blob(name, self)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Node) and value.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Node({self.name!r})"


NodeLike = Annotated[Node | str, "a Node or a name"]


def as_node(node: object, where: str) -> Node:
    """Return a `Node`, or make one from its name."""
    if isinstance(node, str):
        return Node(node)
    if not isinstance(node, Node):
        raise DefinitionError(f"{where}: node must be a Node or a name; got {node!r}.")
    return node


class Blob:
    """A reference to an entry of a node's workspace, not its value.

    Parameters
    ----------
    name : str
    node : Node or str, optional
        By default the node of the task that uses it.
    transient : bool
        Do not save it: at every resume, the init tasks that make it run again. For sockets, open
        files, models on a GPU.
    replicated : bool
        Every node that declares it so has the same value: one copy is saved, and all load it.
    partition : int, optional
        Each node that declares it so has a part of one array. The parts are joined along this
        axis, in the order in which the nodes are defined. Another number of nodes can load them.
        Objects with a state may take the place of arrays (and the axis means nothing): another
        number of nodes loads what their ``merge_state_dicts(states)`` makes of the states of all.
    history : bool or "extend"
        Keep every value: what tasks put in a step of an epoch is one more row, or with "extend" the
        rows along its first axis, of one array, which
        `MultiNodeCheckpointManager.history_of` returns. Values are arrays or numbers, all of the
        first one's dtype and row shape. What init tasks put is only a first value to read.
    compressors : str or Zarr codec, optional
        Compress its arrays in checkpoints: ``"zstd"``, or a codec like
        ``zarr.codecs.ZstdCodec(level=3)``. ``()``: never, even if the manager compresses.
    chunks : int or tuple of int, optional
        Shape of a chunk, which is stored and read as a unit, if the blob is an array.
    dims : str or sequence of str, optional
        Names of the axes, for xarray and other readers of checkpoints. Axes of the same name have
        the same length in all blobs of a node. A blob with the name of its one axis holds the
        axis' labels.
    coords : str or sequence of str, optional
        Blobs of the same node that say where the items lie (longitudes, times): their `dims` are
        among those of this blob.

    Notes
    -----
    The options apply if a task has the blob among its `outputs`.
    """

    __slots__ = (
        "array_options",
        "history",
        "name",
        "node",
        "partition",
        "replicated",
        "transient",
    )

    @checked
    def __init__(
        self,
        name: str,
        node: NodeLike | None = None,
        *,
        transient: bool = False,
        replicated: bool = False,
        partition: Annotated[int, _AXIS] | None = None,
        history: bool | Literal["extend"] = False,
        compressors: object = None,
        chunks: int | Sequence[int] | None = None,
        dims: str | Sequence[str] | None = None,
        coords: str | Sequence[str] | None = None,
    ) -> None:
        self.name = check_name(name, "blob")
        where = f"Blob {name!r}"
        self.node = None if node is None else as_node(node, where)
        self.transient = transient
        self.replicated = replicated
        self.partition = partition
        self.history = history
        self.array_options = read_array_options(compressors, chunks, dims, coords, where)
        if self.transient and self.array_options is not None:
            raise DefinitionError(
                f"{where} is transient, so it is not saved: omit compressors, chunks, dims "
                f"and coords."
            )
        is_history = bool(history)
        if self.transient + self.replicated + (partition is not None) + is_history > 1:
            raise DefinitionError(
                f"{where} combines transient, replicated, partition and history; give only one of "
                f"them."
            )
        options = self.array_options
        if is_history and options not in (None, ArrayOptions(dims=getattr(options, "dims", None))):
            raise DefinitionError(
                f"{where} is a history, whose rows are stored as they are: omit compressors, "
                f"chunks and coords."
            )

    @property
    def key(self) -> tuple[str, str]:
        """Names of its node ("" if it has none) and of itself."""
        if self.node is None:
            return "", self.name
        return self.node.name, self.name

    def on(self, node: Node) -> Blob:
        """A copy of this reference for `node`."""
        blob = copy.copy(self)
        blob.node = node
        return blob

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Blob) and value.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        if self.node is not None:
            parts.append(repr(self.node.name))
        if self.transient:
            parts.append("transient=True")
        if self.replicated:
            parts.append("replicated=True")
        if self.partition is not None:
            parts.append(f"partition={self.partition}")
        if self.history:
            parts.append(f"history={self.history!r}")
        if self.array_options is not None:
            parts.append(str(self.array_options))
        return f"Blob({', '.join(parts)})"
