"""A job whose loss falls and then rises, for tests of callbacks."""

from jobrunner import Callback, Job, Node, Task, current_task, epoch_limiter

LOSSES = (0.9, 0.5, 0.4, 0.45, 0.6, 0.7, 0.8, 0.9)


def descend(n):
    current_task().report(loss=LOSSES[n])
    return n + 1


def build(limit=8, **options):
    with Job("descent", **options) as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n")
        Task(descend, inputs="n", outputs="n", name="descend")
    if limit:
        epoch_limiter(job, limit)
    return job


class DiesAfter(Callback):
    """Ends the run as a crash of the client would, before an epoch is saved."""

    is_essential = True

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch(self, epoch, seconds, metrics):
        if epoch == self.epoch:
            raise InterruptedError("by hand")
