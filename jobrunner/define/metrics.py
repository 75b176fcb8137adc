"""What tasks report: how several values of a name become one, and what only callbacks get.

Pure. Results depend on what was reported, not on which worker or thread was first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from jobrunner.define.checks import Rule, checked
from jobrunner.errors import DefinitionError

if TYPE_CHECKING:
    import numpy as np

Metric = bool | int | float | str
Way = Literal["mean", "sum", "min", "max"]
"""How values become one."""
Over = Literal["step", "epoch"]

MOST_ARRAY_BYTES = 4 << 20
"""Of one array or image that a task reports."""
MOST_ARRAYS_BYTES = 16 << 20
"""Of all those that the tasks of one worker report in one run of a group."""

_DTYPE = re.compile(r"[<|][biuf][1248]")


def _is_number(value: object) -> bool:
    if not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:  # an int of hundreds of digits
        return False
    return True


Number = Annotated[int | float, Rule("a number", _is_number)]
Weight = Annotated[
    int | float, Rule("a number >= 0", lambda value: _is_number(value) and 0 <= value < math.inf)
]


class Total(NamedTuple):
    """Values of one name and node, combined; `Mean`, `Sum`, `Min` and `Max` make one of a value."""

    how: Way
    value: int | float  # of a mean: the sum of the values times their weights
    weight: int | float = 1
    over: Over = "step"

    @property
    def result(self) -> int | float:
        """The combined value."""
        if self.how != "mean":
            return self.value
        return self.value / self.weight if self.weight else math.nan

    def __and__(self, total: Total) -> Total:
        if self.how in ("mean", "sum"):
            value, weight = self.value + total.value, self.weight + total.weight
            return self._replace(value=value, weight=weight)
        if math.isnan(self.value) or math.isnan(total.value):
            return self._replace(value=math.nan)
        choose = min if self.how == "min" else max
        return self._replace(value=choose(self.value, total.value))

    def describe(self) -> str:
        """How values become one, for messages."""
        return f"as {self.how.capitalize()}" + (" over the epoch" if self.over == "epoch" else "")


@checked
def Mean(value: Number, weight: Weight = 1, over: Over = "step") -> Total:  # noqa: N802
    """The mean of what tasks report under a name: ``report(loss=Mean(loss, weight=n))``.

    Parameters
    ----------
    value : int or float
    weight : int or float
        How much it counts, such as the number of records; at least 0. If all weights are 0, the
        mean is NaN.
    over : "step" or "epoch"
        What counts: the reports of one run of the epoch group, or of all steps of the epoch.

    Returns
    -------
    Total
        To be reported.

    Raises
    ------
    DefinitionError
        An argument is invalid.

    Notes
    -----
    All tasks must combine the reports of a name in the same way. If several nodes report it, each
    node's own result is under ``"node/name"``.
    """
    return Total("mean", float(_plain(value)) * float(weight), float(weight), over)


@checked
def Sum(value: Number, over: Over = "step") -> Total:  # noqa: N802
    """The sum of what tasks report under a name; otherwise as `Mean`."""
    return Total("sum", _plain(value), over=over)


@checked
def Min(value: Number, over: Over = "step") -> Total:  # noqa: N802
    """The smallest value that tasks report under a name, NaN if one is NaN; otherwise as `Mean`."""
    return Total("min", _plain(value), over=over)


@checked
def Max(value: Number, over: Over = "step") -> Total:  # noqa: N802
    """The largest value that tasks report under a name, NaN if one is NaN; otherwise as `Mean`."""
    return Total("max", _plain(value), over=over)


def _plain(value: Any) -> int | float:
    plain = value.item() if hasattr(value, "item") else value
    return int(plain) if isinstance(plain, int) else float(plain)


@checked
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Image:
    """A picture for callbacks: ``report(sample=Image(pixels))``.

    Parameters
    ----------
    pixels : array_like
        Of shape (height, width), or (height, width, n) with n = 1 (grey), 3 (RGB) or 4 (RGBA); of
        dtype uint8, or of floats from 0 to 1; NaN is black.

    Attributes
    ----------
    pixels : numpy.ndarray of uint8

    Raises
    ------
    DefinitionError
        It has another shape or dtype, or floats outside of 0 to 1.
    """

    pixels: np.ndarray[Any, Any]

    def __init__(self, pixels: Any) -> None:
        import numpy as np

        array = np.asarray(pixels)
        is_grey = array.ndim == 2
        if not array.size or not (is_grey or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
            raise DefinitionError(
                f"Image: expected an array of shape (height, width) or (height, width, 1, 3 or 4); "
                f"got shape {array.shape}. Move the axis of the colours to the end, as in "
                f"Image(pixels.transpose(1, 2, 0))."
            )
        if array.dtype.kind == "f":
            levels = np.rint(np.where(np.isnan(array), 0, array) * 255)
            if levels.min() < 0 or levels.max() > 255:
                raise DefinitionError(
                    f"Image: expected floats from 0 to 1; got {np.nanmin(array):g} to "
                    f"{np.nanmax(array):g}. Scale the pixels, as in Image(pixels / pixels.max()), or "
                    f"cut them off, as in Image(pixels.clip(0, 1))."
                )
            array = levels.astype(np.uint8)
        if array.dtype != np.uint8:
            raise DefinitionError(
                f"Image: expected uint8, or floats from 0 to 1; got {array.dtype}. Convert the "
                f"pixels, as in pixels.astype('uint8')."
            )
        object.__setattr__(self, "pixels", array)


class ArrayEntry(NamedTuple):
    """An array or image that a task reported, as it is sent."""

    name: str
    node: str
    order: int  # as in `MetricEntry`
    instance: int
    is_image: bool
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def decode(self) -> Any:
        """The array or image; raises ValueError if the fields contradict each other."""
        import numpy as np

        if not _DTYPE.fullmatch(self.dtype) or len(self.data) > MOST_ARRAY_BYTES:
            raise ValueError(f"{self.dtype!r:.20} of {len(self.data)} bytes is no reported array")
        if len(self.shape) > 32 or min(self.shape, default=0) < 0:
            raise ValueError("a reported array has no such shape")
        array = np.frombuffer(self.data, self.dtype).reshape(self.shape)
        try:
            return Image(array) if self.is_image else array
        except DefinitionError as error:
            raise ValueError(str(error)) from error


def pack_array(value: Image | np.ndarray[Any, Any]) -> tuple[bool, str, tuple[int, ...], bytes]:
    """The last fields of an `ArrayEntry`; raises ValueError, which says why, if it cannot be sent."""
    import numpy as np

    array = value.pixels if isinstance(value, Image) else value
    dtype = array.dtype.newbyteorder("<")
    if not _DTYPE.fullmatch(dtype.str):
        raise ValueError(f"its dtype is {array.dtype}; convert it to numbers of at most 8 bytes")
    if array.nbytes > MOST_ARRAY_BYTES:
        raise ValueError(
            f"it has {array.nbytes} bytes, and at most {MOST_ARRAY_BYTES} are sent; report a part "
            f"of it, or a smaller picture"
        )
    data = np.ascontiguousarray(array, dtype).tobytes()
    return isinstance(value, Image), dtype.str, array.shape, data


class MetricEntry(NamedTuple):
    """What a task reported under a name: the last value, or several combined."""

    name: str
    node: str
    order: int  # the task's place in the order of definition
    instance: int
    value: Metric | Total


Totals = dict[str, dict[str, Total]]
"""Name -> node -> what is combined over the steps of an epoch."""


@dataclass(slots=True)
class Reported:
    """What tasks reported in one run of a group, or in the steps of an epoch so far.

    If several nodes report a metric, `metrics` has what they become under its name, and each node's
    own under ``"node/name"``.
    """

    metrics: dict[str, Metric] = field(default_factory=dict)
    totals: Totals = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)  # and images; only for callbacks

    def add(self, step: Reported) -> None:
        """Add what was reported in the next step; raises DefinitionError if ways are mixed."""
        for name in (self.totals.keys() | step.totals.keys()) & self.metrics.keys():
            if name in step.metrics and _ways(self, name) != _ways(step, name):
                raise DefinitionError(
                    f"Metric {name!r} is reported in different ways in the steps of an epoch: "
                    f"{_ways(self, name)}; {_ways(step, name)}. Report it in one way."
                )
        for name in self.arrays.keys() & step.metrics.keys():
            del self.arrays[name]
        self.metrics.update(step.metrics)
        self.arrays.update(step.arrays)
        for name, nodes in step.totals.items():
            totals = self.totals.setdefault(name, {})
            for node, total in nodes.items():
                totals[node] = totals[node] & total if node in totals else total
            self.metrics.update(_combined(name, totals))


def merge_reports(entries: Iterable[MetricEntry], arrays: Iterable[ArrayEntry] = ()) -> Reported:
    """Merge what all workers sent of one run; raises DefinitionError if ways are mixed."""
    merged = Reported()
    of_nodes: dict[str, Any] = {}
    for name, reports in _by_name(entries).items():
        nodes_by_way = {_describe(entry.value): entry.node for entry in reports}
        if len(nodes_by_way) > 1:
            descriptions = "; ".join(
                f"{description} by node {node!r}" for description, node in nodes_by_way.items()
            )
            raise DefinitionError(
                f"Metric {name!r} is reported in different ways: {descriptions}. Report it in one way."
            )
        totals: dict[str, Total] = {}
        for entry in reports:
            if not isinstance(entry.value, Total):
                merged.metrics[name] = entry.value  # the last one counts
                if len(reports) > 1:
                    of_nodes[f"{entry.node}/{name}"] = entry.value
            elif entry.node in totals:
                totals[entry.node] &= entry.value
            else:
                totals[entry.node] = entry.value
        if totals:
            combined = _combined(name, totals)
            merged.metrics[name] = combined.pop(name)
            of_nodes.update(combined)
            if next(iter(totals.values())).over == "epoch":
                merged.totals[name] = totals
    merged.metrics.update(of_nodes)
    for name, pictures in _by_name(arrays).items():
        merged.arrays[name] = pictures[-1].decode()
        if len(pictures) > 1:
            merged.arrays.update(
                {f"{picture.node}/{name}": picture.decode() for picture in pictures}
            )
    return merged


def _by_name(entries: Iterable[Any]) -> dict[str, list[Any]]:
    """Entries by name, in order of definition."""
    by_name: dict[str, list[Any]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.order, entry.instance, entry.node)):
        by_name.setdefault(entry.name, []).append(entry)
    return by_name


def _combined(name: str, totals: dict[str, Total]) -> dict[str, Metric]:
    """The results of all nodes and of each; in an order that steps do not change."""
    nodes = sorted(totals)
    whole = totals[nodes[0]]
    for node in nodes[1:]:
        whole = whole & totals[node]
    of_nodes = {f"{node}/{name}": totals[node].result for node in nodes} if len(nodes) > 1 else {}
    return {name: whole.result, **of_nodes}


def _ways(reported: Reported, name: str) -> str:
    """How the nodes report a metric in one step, or in the steps so far."""
    totals = reported.totals.get(name)
    if totals is None:
        return 'without over="epoch"'
    return ", ".join(sorted({total.describe() for total in totals.values()}))


def _describe(value: Metric | Total) -> str:
    return value.describe() if isinstance(value, Total) else "plainly"
