"""What a run does about the loss of a worker or of the scheduler."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from jobrunner.errors import SchedulerLostError, TaskFailedError
from jobrunner.run.losses import Loss
from jobrunner.texts import clip, printable

if TYPE_CHECKING:
    from jobrunner.run.loop import Run


def count_loss(run: Run, error: Loss) -> None:
    """Count a loss and wait for a lost scheduler; raise if the run cannot continue."""
    run.watch.lose(clip(printable(error.without_advice(), kept=""), 500))
    run.callbacks.notify("on_loss", error)
    run.saver.wait_quietly(gives_up=not isinstance(error, TaskFailedError))
    state = run.state
    losses = state.losses = state.losses.after_error(error)
    state.wary_until = max(state.wary_until, state.under_way.stop)
    if losses.are_too_many:
        last = copy.copy(error)
        last.args = (f"{error.without_advice()} {losses.describe()}",)
        raise last.advise(run.advice()) from error
    if run.runner.stop_reason:
        raise run.stopped(None, "a loss ended its epoch") from error
    if isinstance(error, SchedulerLostError) or not run.session.is_connected:
        seconds = run.runner.scheduler_wait_seconds
        run.callbacks.warn(
            f"The scheduler is lost. Waiting up to {seconds:g} s for it to return at its address."
        )
        try:
            run.session.reconnect(seconds)
        except SchedulerLostError as lost:
            raise SchedulerLostError(str(lost)).advise(run.advice()) from error
