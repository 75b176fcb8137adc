"""Cluster handwritten digits with k-means, the points sharded over nodes.

::

    jobrunner run examples/kmeans.py --checkpoint runs/kmeans
    jobrunner run examples/kmeans.py --checkpoint runs/k12 --param k=12
    python examples/kmeans.py

Each trainer holds a shard of the 1,797 images of 8 x 8 pixels that ship with scikit-learn. In an
epoch every trainer assigns its points to the nearest centroid, and the server moves each centroid
to the mean of its points. It ends when the centroids stand still. Stop it whenever you like; the
same command resumes from the last recorded epoch and comes to the same centroids, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

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


def load_shard(index: int, count: int) -> Array:
    """Load every `count`-th image, from the `index`-th on, as (images, 64)."""
    points: Array = load_digits().data[index::count]
    return points


def first_centroids(k: int) -> Array:
    """Choose `k` of the images, as (k, 64)."""
    points: Array = load_digits().data
    chosen = current_task().rng.choice(len(points), size=k, replace=False)
    first: Array = points[chosen]
    return first


def assign(points: Array, centroids: Array) -> tuple[Array, npt.NDArray[np.int64], float]:
    """Sum and count the points nearest to each centroid, and their squared distances."""
    distances = ((points[:, None, :] - centroids) ** 2).sum(axis=2)
    nearest = distances.argmin(axis=1)
    sums = np.zeros_like(centroids)
    np.add.at(sums, nearest, points)
    counts = np.bincount(nearest, minlength=len(centroids))
    return sums, counts, float(distances.min(axis=1).sum())


def recompute(
    centroids: Array, parts: list[tuple[Array, npt.NDArray[np.int64], float]]
) -> tuple[Array, bool]:
    """Move each centroid to the mean of its points, and tell whether none has moved."""
    # Always summed in the order of the trainers, so that the bits do not depend on timing.
    sums = np.sum([sums for sums, _, _ in parts], axis=0)
    counts = np.sum([counts for _, counts, _ in parts], axis=0)[:, None]
    moved = np.where(counts > 0, sums / np.maximum(counts, 1), centroids)
    shift = float(np.abs(moved - centroids).max())
    current_task().report(inertia=sum(inertia for _, _, inertia in parts), shift=shift)
    return moved, shift < 1e-6


def save_centroids(centroids: Array, path: str) -> None:
    """Write the centroids as a NumPy file."""
    np.save(path, centroids)
    print(f"wrote {len(centroids)} centroids to {path}", flush=True)


@job
def build_job(trainers: int = 4, k: int = 10, output: str = "kmeans-centroids.npy") -> Job:
    """Define the job; nothing runs yet."""
    server = Node("server")
    nodes = [Node(f"trainer:{i}") for i in range(trainers)]
    with Job("kmeans", stop_conditions=[server["is_still"]]) as made:
        with made.init_group:
            Task(first_centroids, outputs="centroids", node=server, kwargs={"k": k})
            Task.on_each(
                nodes,
                load_shard,
                outputs="points",
                kwargs=lambda i: {"index": i, "count": trainers},
            )
        parts = Task.on_each(nodes, assign, inputs={"centroids": server["centroids"]})
        Task(recompute, inputs={"parts": parts}, outputs=["centroids", "is_still"], node=server)
        with made.exit_group:
            # Absolute here, on the client: a worker may have another current directory.
            Task(save_centroids, node=server, kwargs={"path": str(Path(output).absolute())})
    epoch_limiter(made, 100)
    return made


if __name__ == "__main__":
    with Session.local(workers=2) as session:
        result = JobRunner(build_job(), MultiNodeCheckpointManager("runs/kmeans")).run(session)
    print(f"epoch {result.epoch}, stopped by {result.stopped_by}")
