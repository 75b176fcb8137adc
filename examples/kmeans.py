"""Cluster points with k-means, the points sharded over nodes.

::

    jobrunner run examples/kmeans.py --checkpoint runs/kmeans
    jobrunner run examples/kmeans.py --checkpoint runs/k8 --param k=8
    python examples/kmeans.py

Each trainer draws its own points, in groups around a few places on a plane. In an epoch every
trainer assigns its points to the nearest centroid, and the server moves each centroid to the mean
of its points. The job ends when the centroids stand still, and prints them. Stop it whenever you
like: the same command resumes from the last recorded epoch and finds the same centroids, bit for
bit.
"""

from __future__ import annotations

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

PLACES = np.array([[0.0, 0.0], [8.0, 1.0], [4.0, 7.0], [-3.0, 6.0], [2.0, -6.0]])


def draw_points(count: int) -> Array:
    """Draw points around the places, as (count, 2)."""
    rng = current_task().rng
    places = PLACES[rng.integers(len(PLACES), size=count)]
    points: Array = places + rng.normal(scale=2, size=(count, 2))
    return points


def choose_centroids(samples: list[Array], k: int) -> Array:
    """Choose `k` of the points as first centroids, each as far from the others as can be."""
    points = np.concatenate(samples)
    chosen = [points[0]]
    while len(chosen) < k:
        distances = np.linalg.norm(points[:, None] - np.array(chosen), axis=2)
        chosen.append(points[distances.min(axis=1).argmax()])
    return np.array(chosen)


def assign(points: Array, centroids: Array) -> tuple[Array, Array, float]:
    """Sum and count the points nearest to each centroid, and sum their squared distances."""
    distances = ((points[:, None] - centroids) ** 2).sum(axis=2)
    is_nearest = np.eye(len(centroids))[distances.argmin(axis=1)]
    counts = is_nearest.sum(axis=0)[:, None]
    return is_nearest.T @ points, counts, float(distances.min(axis=1).sum())


def recompute(centroids: Array, parts: list[tuple[Array, Array, float]]) -> tuple[Array, bool]:
    """Move each centroid to the mean of its points; tell whether all stood still."""
    # Always summed in the order of the trainers, so that the bits do not depend on timing.
    sums = np.sum([sums for sums, _, _ in parts], axis=0)
    counts = np.sum([counts for _, counts, _ in parts], axis=0)
    means: Array = np.where(counts > 0, sums / np.maximum(counts, 1), centroids)
    current_task().report(inertia=sum(inertia for _, _, inertia in parts))
    return means, bool(np.allclose(means, centroids, rtol=0, atol=1e-9))


def print_clusters(centroids: Array, parts: list[tuple[Array, Array, float]]) -> None:
    """Print what was found, the largest cluster first."""
    counts = np.sum([counts for _, counts, _ in parts], axis=0)[:, 0]
    print(f"{len(centroids)} clusters of {int(counts.sum()):,} points:")
    for cluster in np.argsort(-counts, kind="stable"):
        x, y = centroids[cluster]
        print(f"  {int(counts[cluster]):6,} points around ({x:6.3f}, {y:6.3f})", flush=True)


@job
def build_job(trainers: int = 4, k: int = 5, points: int = 10_000) -> Job:
    """Define the job; nothing runs yet."""
    server = Node("server")
    nodes = [Node(f"trainer:{i}") for i in range(trainers)]
    with Job("kmeans", stop_conditions=[server["stood_still"]]) as kmeans:
        with kmeans.init_group:
            Task.on_each(nodes, draw_points, outputs="points", kwargs={"count": points})
            samples = {"samples": [node["points"] for node in nodes]}
            Task(choose_centroids, samples, outputs="centroids", node=server, kwargs={"k": k})
        parts = Task.on_each(nodes, assign, {"centroids": server["centroids"]})
        Task(recompute, {"parts": parts}, outputs=["centroids", "stood_still"], node=server)
        with kmeans.exit_group:
            parts = Task.on_each(nodes, assign, {"centroids": server["centroids"]})
            Task(print_clusters, {"parts": parts}, node=server)
    epoch_limiter(kmeans, 100)
    return kmeans


if __name__ == "__main__":
    with Session.local(workers=2) as session:
        result = JobRunner(build_job(), MultiNodeCheckpointManager("runs/kmeans")).run(session)
    print(f"epoch {result.epoch}, stopped by {result.stopped_by}")
