"""What the ports share: a job that counts, and policies asked by hand."""

from __future__ import annotations

from pathlib import Path

from jobrunner import (
    Job,
    Moment,
    MultiNodeCheckpointManager,
    Node,
    Position,
    SavedEpoch,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)

N = Node("a")["n"]
"""How many steps the job has run: no step is counted twice, and none is left out."""


def counter(limit, *, fails_at=None, losses=None, **options):
    """Count steps to `limit` epochs; fail before the step `fails_at`; report `losses[epoch]`."""

    def count(n):
        if n + 1 == fails_at:
            raise RuntimeError("interrupted")
        me = current_task()
        if losses is None:
            me.report(loss=1 / (n + 1))
        elif me.epoch in losses:
            me.report(loss=losses[me.epoch])
        return n + 1

    with Job("counter", **options) as job, Node("a"):
        with job.init_group:
            Task(int, outputs="n", name="zero")
        Task(count, outputs="n")
        epoch_limiter(job, limit)
    return job


def manager_of(tmp_path: Path, **options) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(tmp_path / "ckpt", **options)


def interrupted(runner, session):
    """Run until the job fails."""
    try:
        runner.run(session)
    except TaskFailedError:
        return
    raise AssertionError("the job did not fail")


def kept(policy, metrics, times=None, after_each=False):
    """The epochs that a policy keeps of those in `metrics`, all at once or as they are recorded."""
    if not after_each:
        return [epoch for epoch in metrics if epoch not in _retired(policy, metrics, times)]
    found = {}
    for epoch, values in metrics.items():
        found[epoch] = values
        retired = set(_retired(policy, found, times)) - {epoch}  # the newest always stays
        found = {it: found[it] for it in found if it not in retired}
    return list(found)


def _retired(policy, metrics, times):
    times = times or {}
    saved = [SavedEpoch(at, times.get(at, 0.0), reported) for at, reported in metrics.items()]
    return [at.public for at in map(Position.of, policy.retires(saved))]


def due(policy, epochs, steps_per_epoch=1):
    """The moments (epoch, step), counted from 1, at which a policy saves."""
    return [
        (epoch, step)
        for epoch in range(1, epochs + 1)
        for step in range(1, steps_per_epoch + 1)
        if policy.is_due(Moment(epoch, step, steps_per_epoch, seconds_since_save=0))
    ]
