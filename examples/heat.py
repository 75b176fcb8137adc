"""Let heat spread over a plate that is split over nodes.

::

    jobrunner run examples/heat.py --checkpoint runs/heat
    jobrunner run examples/heat.py --checkpoint runs/large --param size=1024
    python examples/heat.py

Each node holds some rows of the plate. In an epoch every node first publishes its outer rows, then
takes a step of the explicit scheme with the rows that its neighbours have published. The plate is
a torus (what leaves at one edge comes in at the opposite one), so its heat stays the same. The
result has the same bits on any number of workers, interrupted or not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    current_task,
    epoch_limiter,
    job,
)

Array = npt.NDArray[np.float64]

DIFFUSIVITY = 0.2


def cold_plate_with_hot_square(index: int, count: int, size: int) -> Array:
    """Make the `index`-th of `count` blocks of rows of a (size, size) plate."""
    plate = np.zeros((size, size))
    plate[size // 4 : size // 2, size // 4 : size // 2] = 100.0
    return np.array_split(plate, count)[index].copy()


def publish_edges(field: Array) -> tuple[Array, Array]:
    """Hand out the first and the last row."""
    return field[0], field[-1]


def step(row_above: Array, row_below: Array, field: Array) -> float:
    """Let heat flow for one step, in place; return the largest change."""
    padded = np.vstack([row_above, field, row_below])
    around = padded[:-2] + padded[2:] + np.roll(field, 1, axis=1) + np.roll(field, -1, axis=1)
    change = DIFFUSIVITY * (around - 4 * field)
    field += change
    return float(np.abs(change).max())


def is_level(changes: list[float], tolerance: float) -> bool:
    """Tell whether nothing moves any more, and report how much still does."""
    current_task().report(change=max(changes))
    return max(changes) < tolerance


def save_plate(fields: list[Array], path: str) -> None:
    """Put the blocks together and write them as a NumPy file."""
    plate = np.concatenate(fields)
    np.save(path, plate)
    print(f"wrote {plate.shape} plate of mean {plate.mean():.6f} to {path}", flush=True)


@job
def build_job(
    blocks: int = 4,
    size: int = 256,
    epochs: int = 1000,
    output: str = "heat-plate.npy",
) -> Job:
    """Define the job; nothing runs yet."""
    nodes = [Node(f"block:{i}") for i in range(blocks)]
    with Job("heat") as made:
        with made.init_group:
            Task.on_each(
                nodes,
                cold_plate_with_hot_square,
                outputs="field",
                kwargs=lambda i: {"index": i, "count": blocks, "size": size},
            )
        # All publish before any steps: a read of another node's blob sees the last write that was
        # defined before it, so each step sees its neighbours' rows of the same moment.
        Task.on_each(nodes, publish_edges, outputs=["first", "last"])
        changes = Task.on_each(
            nodes,
            step,
            lambda i: {
                "row_above": nodes[i - 1]["last"],
                "row_below": nodes[(i + 1) % blocks]["first"],
            },
            updates="field",
        )
        made.add_stop_condition(
            Task(is_level, {"changes": changes}, kwargs={"tolerance": 1e-4}, node=nodes[0])
        )
        with made.exit_group:
            Task(
                save_plate,
                {"fields": [node["field"] for node in nodes]},
                # Absolute here, on the client: a worker may have another current directory.
                kwargs={"path": str(Path(output).absolute())},
                node=nodes[0],
            )
    epoch_limiter(made, epochs)
    return made


if __name__ == "__main__":
    with Session.local(workers=2) as session:
        result = JobRunner(build_job(), MultiNodeCheckpointManager("runs/heat")).run(session)
    print(f"epoch {result.epoch}, stopped by {result.stopped_by}")
