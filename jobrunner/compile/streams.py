"""The streams of the global random generators that go on: see `Job(capture_rng=)`."""

from __future__ import annotations

import hashlib

from jobrunner.define import Blob, GlobalRNG, Job, Task, without_partials
from jobrunner.errors import DefinitionError

STREAM = "global_rng"
"""The blob of a node that contains its stream."""


def global_rng(seed: int) -> GlobalRNG:
    """What the init tasks that make streams call."""
    return GlobalRNG(seed)


def add_streams(job: Job) -> frozenset[Task]:
    """Let init tasks make the streams; return the tasks that go on with them.

    Others draw the same numbers again only if each of their calls begins with a stream of its own:
    init tasks, which may run again after a load; those of nodes that are not saved; instances and
    items of pipes, which run at the same time.
    """
    saved = set(job.nodes_to_checkpoint())
    found = [
        task
        for group in (job.epoch_group, job.epoch_end_group)
        for task in group.tasks()
        if task.node in saved
        and task.num_instances == 1
        and not (task.is_final or hasattr(without_partials(task.fn), "seeded_within"))
    ]
    nodes = {task.node.name: task.node for task in found}
    for task in (task for group in job.groups.values() for task in group.tasks()):
        if task.fn is global_rng:  # the job has been compiled before
            nodes.pop(task.node.name, None)
            continue
        for blob in (*task.inputs, *task.updates, *task.output_blobs):
            if isinstance(blob, Blob) and blob.name == STREAM and blob.key[0] in nodes:
                raise DefinitionError(
                    f"Task {task.full_name!r} names blob {STREAM!r}, in which a job with capture_rng "
                    f"keeps the states of its global generators. Rename yours."
                )
    for node in nodes.values():
        identity = repr((job.seed, node.uid or node.name)).encode("utf-8", "surrogatepass")
        seed = int.from_bytes(hashlib.blake2b(identity, digest_size=32).digest(), "big")
        Task(global_rng, (), STREAM, kwargs={"seed": seed}, node=node, group=job.init_group)
    return frozenset(found)
