"""What tasks report: how several values of a name become one.

Pure. Results depend on what was reported, not on which worker or thread was first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Annotated, Any, Literal, NamedTuple

from jobrunner.define.checks import Rule, checked
from jobrunner.errors import DefinitionError

Metric = bool | int | float | str


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

    how: Literal["mean", "sum", "min", "max"]
    value: int | float  # of a mean: the sum of the values times their weights
    weight: int | float = 1

    @property
    def result(self) -> int | float:
        """The combined value."""
        if self.how != "mean":
            return self.value
        return self.value / self.weight if self.weight else math.nan

    def __and__(self, total: Total) -> Total:
        if self.how in ("mean", "sum"):
            return Total(self.how, self.value + total.value, self.weight + total.weight)
        if math.isnan(self.value) or math.isnan(total.value):
            return Total(self.how, math.nan)
        if self.how == "min":
            return Total(self.how, min(self.value, total.value))
        return Total(self.how, max(self.value, total.value))


@checked
def Mean(value: Number, weight: Weight = 1) -> Total:  # noqa: N802
    """The mean of what tasks report under a name: ``report(loss=Mean(loss, weight=n))``.

    Parameters
    ----------
    value : int or float
    weight : int or float
        How much it counts, such as the number of records; at least 0. If all weights are 0, the
        mean is NaN.

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
    return Total("mean", float(_plain(value)) * float(weight), float(weight))


@checked
def Sum(value: Number) -> Total:  # noqa: N802
    """The sum of the numbers that tasks report under a name: ``report(records=Sum(n))``."""
    return Total("sum", _plain(value))


@checked
def Min(value: Number) -> Total:  # noqa: N802
    """The smallest number that tasks report under a name; NaN if one is NaN."""
    return Total("min", _plain(value))


@checked
def Max(value: Number) -> Total:  # noqa: N802
    """The largest number that tasks report under a name; NaN if one is NaN."""
    return Total("max", _plain(value))


def _plain(value: Any) -> int | float:
    if hasattr(value, "item"):  # of NumPy
        value = value.item()
    return int(value) if isinstance(value, int) else float(value)


class MetricEntry(NamedTuple):
    """What a task reported under a name: the last value, or several combined."""

    name: str
    node: str
    order: int  # the task's place in the order of definition
    instance: int
    value: Metric | Total


def merge_reports(entries: Iterable[MetricEntry]) -> dict[str, Metric]:
    """Merge what all workers sent of one run; raises DefinitionError if ways are mixed.

    If several nodes report a metric, its name has what they become, and ``"node/name"`` each node's
    own.
    """
    by_name: dict[str, list[MetricEntry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.order, entry.instance, entry.node)):
        by_name.setdefault(entry.name, []).append(entry)
    metrics: dict[str, Metric] = {}
    of_nodes: dict[str, Metric] = {}
    for name, reports in by_name.items():
        by_node: dict[str, Metric | Total] = {}
        nodes_by_kind: dict[str, str] = {}
        for entry in reports:
            before, value = by_node.get(entry.node), entry.value
            if isinstance(value, Total) and isinstance(before, Total):
                value = before & value
            by_node[entry.node] = value  # of plain ones, the last one counts
            kind = "plainly"
            if isinstance(value, Total):
                kind = f"as {value.how.capitalize()}"
            nodes_by_kind[kind] = entry.node
        if len(nodes_by_kind) > 1:
            kinds = "; ".join(f"{kind} by node {node!r}" for kind, node in nodes_by_kind.items())
            raise DefinitionError(
                f"Metric {name!r} is reported in different ways: {kinds}. Report it in one way."
            )
        whole: Metric | Total = reports[-1].value
        totals = [value for _, value in sorted(by_node.items()) if isinstance(value, Total)]
        if totals:
            whole = totals[0]
            for total in totals[1:]:
                whole = whole & total
        metrics[name] = _result(whole)
        if len(by_node) > 1:
            of_nodes |= {f"{node}/{name}": _result(value) for node, value in by_node.items()}
    return metrics | of_nodes


def _result(value: Metric | Total) -> Metric:
    return value.result if isinstance(value, Total) else value
