"""A job whose every bit depends on all epochs before: random steps, halos, and a growing tuple."""

import numpy as np

from jobrunner import Blob, Job, Node, Task, current_task, epoch_limiter

NODES = 3
EPOCHS = 40


def start(i):
    return np.arange(2000, dtype=np.float64) + i, (i,)


def edge(x):
    return x[:10].copy()


def drift(history, *others):
    *edges, x = others
    task = current_task()
    x += task.rng.standard_normal(x.size)
    for other in edges:
        x[-10:] += 0.5 * other
    task.report(mean=x.mean())
    return (*history[-5:], float(x[0]))


def sample(x):
    return x[:6].reshape(3, 2).copy()


def build():
    nodes = [Node(f"part:{i}") for i in range(NODES)]
    with Job("drift", seed=7) as job:
        for i, node in enumerate(nodes):
            with job.init_group:
                Task(start, outputs=["x", "history"], node=node, kwargs={"i": i})
            Task(edge, inputs="x", outputs="edge", node=node)
            Task(sample, inputs="x", outputs=Blob("samples", history="extend"), node=node)
        for i, node in enumerate(nodes):
            left = nodes[(i + 1) % NODES]["edge"]
            Task(drift, inputs=["history", left], updates="x", outputs="history", node=node)
        epoch_limiter(job, EPOCHS)
    return job


job = build()
