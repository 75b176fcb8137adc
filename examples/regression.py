"""Fit a linear model to a Dask array that lies on the cluster.

::

    python examples/regression.py
    jobrunner run examples/regression.py --checkpoint runs/regression

Each block of rows belongs to a node, which keeps it where Dask has it. In an epoch every node computes
the gradient of its rows, and the server sums the gradients and moves the weights. The rows are
transient: a checkpoint has the weights only, and a resume takes the rows from Dask again. Workers may
join and leave meanwhile; the weights have the same bits. The residuals are a Dask array again.
"""

from __future__ import annotations

import sys
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from distributed import Client, LocalCluster

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    TaskGroup,
    current_task,
    epoch_limiter,
    job,
)

Array = npt.NDArray[np.float64]


def make_data(rows: int, features: int, blocks: int) -> tuple[Any, Any]:
    """Rows of features, and a target for each, as Dask arrays; nothing is computed yet."""
    rng = da.random.default_rng(7)
    x = rng.normal(size=(rows, features), chunks=(-(-rows // blocks), features))
    noise = rng.normal(scale=0.1, size=rows, chunks=x.chunks[0])
    return x, x @ np.arange(1.0, features + 1) + noise


def gradient(x: Array, y: Array, w: Array) -> tuple[Array, float]:
    """The gradient of the squared error of some rows, and that error."""
    errors = x @ w - y
    return x.T @ errors, float(errors @ errors)


def descend(parts: list[tuple[Array, float]], w: Array, rate: float) -> None:
    """Move the weights against the sum of the gradients, in the order of the nodes."""
    w -= rate * np.sum([part for part, _ in parts], axis=0)
    current_task().report(error=sum(error for _, error in parts))


def build_from(x: Any, y: Any, epochs: int) -> Job:
    """Define the job for two Dask arrays with the same blocks of rows."""
    server, parts = Node("server"), [Node(f"part:{i}") for i in range(x.numblocks[0])]
    rows = [Blob("x", transient=True), Blob("y", transient=True)]
    with Job("regression") as regression:
        with regression.init_group:
            Task.on_each(
                parts,
                lambda x, y: (x, y),
                outputs=rows,
                kwargs=lambda i: {"x": x.blocks[i], "y": y.blocks[i]},
                name="take",
            )
            Task(np.zeros, outputs="w", node=server, kwargs={"shape": x.shape[1]})
        gradients = Task.on_each(parts, gradient, {"w": server["w"]})
        rate = {"rate": 0.5 / x.shape[0]}
        Task(descend, {"parts": gradients}, updates="w", node=server, kwargs=rate)
    epoch_limiter(regression, epochs)
    return regression


def residuals(session: Session, blocks: int) -> Any:
    """What the model does not explain of each row, as a Dask array on the workers."""
    group = TaskGroup(workspace_type="global")
    w = {"w": Node("server")["w"]}
    nodes = [f"part:{i}" for i in range(blocks)]
    Task.on_each(nodes, lambda x, y, w: x @ w - y, w, "residuals", name="compare", group=group)
    session.run(group)
    return session.array("residuals", axis=0)


@job
def build_job(rows: int = 100_000, features: int = 20, blocks: int = 8, epochs: int = 40) -> Job:
    """Define the job for data that are computed when it runs."""
    return build_from(*make_data(rows, features, blocks), epochs)


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "runs/regression"
    with (
        LocalCluster(n_workers=2) as cluster,
        Client(cluster) as client,
        Session(client) as session,
    ):
        x, y = client.persist([*make_data(100_000, 20, 8)])
        manager = MultiNodeCheckpointManager(directory)
        JobRunner(build_from(x, y, 40), manager).run(session)
        spread = residuals(session, x.numblocks[0]).std().compute()
        print(f"the residuals have a standard deviation of {spread:.4f}")
