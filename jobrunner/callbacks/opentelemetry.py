"""Spans for OpenTelemetry."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from jobrunner.callbacks.metrics import plain_metrics, require
from jobrunner.positions import Position
from jobrunner.run import Callback, JobRunner, ResumePlan, RunResult, SaveReport


class OpenTelemetry(Callback):
    """Make a span of the run, and within it of loads, groups, epochs, saves and recoveries.

    Parameters
    ----------
    tracer_provider : opentelemetry.trace.TracerProvider, optional
        By default the global one.

    Raises
    ------
    DefinitionError
        OpenTelemetry is not installed.

    Notes
    -----
    ``jobrunner.run`` is the child of the span that is current when the run begins. Its children are
    ``jobrunner.load``, ``jobrunner.init`` and the other groups, ``jobrunner.epoch`` with the metrics
    as attributes, and ``jobrunner.recovery``; ``jobrunner.save`` is a child of its epoch. Warnings
    and losses are events. The span of a run that resumes links to that of the run that recorded the
    epoch. Epochs that workers run in a batch are laid one after another in its time.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[OpenTelemetry()])
    """

    is_passive = True

    def __init__(self, tracer_provider: Any = None) -> None:
        self._api = require("opentelemetry.trace", "opentelemetry", "OpenTelemetry")
        self._tracer = self._api.get_tracer("jobrunner", tracer_provider=tracer_provider)
        self._run: Any = None
        self._epochs: dict[int, Any] = {}  # the span of the last epoch, for its save
        self._begun_at = self._ended_at = 0  # ns; of the epoch under way, of the span before

    def on_setup(self, runner: JobRunner) -> None:
        """Begin the span of the run."""
        self._ended_at = time.time_ns()
        about = {"jobrunner.job": runner.job.name}
        self._run = self._tracer.start_span("jobrunner.run", attributes=about)

    def state_dict(self) -> Mapping[str, str]:
        """The span of the run, as in the header ``traceparent``."""
        context = self._run.get_span_context()
        flags = int(context.trace_flags)
        return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Link to the run that recorded the loaded epoch."""
        found = re.fullmatch(
            "00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", str(state.get("traceparent", ""))
        )
        if found is not None:
            trace, span, flags = (int(part, 16) for part in found.groups())
            context = self._api.SpanContext(trace, span, True, self._api.TraceFlags(flags))
            if span != self._run.get_span_context().span_id:
                self._run.add_link(context)

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """Note from where the run begins."""
        self._run.set_attribute("jobrunner.reason", plan.reason)
        if plan.epoch is not None:
            self._run.set_attribute("jobrunner.resumed_from", Position.of(plan.epoch).epoch)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Add the span of a load."""
        self._add("load", seconds, {"epoch": epoch, "step": step})

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Add the span of a group."""
        self._add(group, seconds, {"epoch": epoch})

    def on_epoch_start(self, epoch: int) -> None:
        """Note the time."""
        self._begun_at = time.time_ns()

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Add the span of an epoch."""
        is_batched = time.time_ns() - self._begun_at < seconds * 5e8
        start = self._ended_at if is_batched else self._begun_at
        named = {f"metric.{name}": value for name, value in metrics.items()}
        about = {"epoch": epoch, **named}
        self._epochs = {epoch: self._add("epoch", seconds, about, start=start)}

    def on_save(self, report: SaveReport) -> None:
        """Add the span of a save."""
        at = Position.of(report.epoch)
        about = {"epoch": at.epoch, "step": at.step, "nbytes": report.nbytes}
        parent = None if at.step else self._epochs.get(at.epoch)
        self._add("save", report.seconds, about, parent=parent, error=report.error)

    def on_loss(self, error: Exception) -> None:
        """Add an event."""
        self._run.record_exception(error)

    def on_recovery(self, epoch: int, step: int, seconds: float) -> None:
        """Add the span of a recovery."""
        self._add("recovery", seconds, {"epoch": epoch, "step": step})

    def on_warning(self, message: str) -> None:
        """Add an event."""
        self._run.add_event("warning", {"message": message})

    def on_finish(self, result: RunResult) -> None:
        """End the span of the run."""
        self._run.set_attribute("jobrunner.epoch", result.epoch)
        self._run.set_attribute("jobrunner.stopped_by", result.stopped_by)
        self._run.end()

    def on_error(self, error: BaseException) -> None:
        """End the span of the run as failed."""
        self._run.record_exception(error)
        self._run.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        self._run.end()

    def _add(
        self,
        name: str,
        seconds: float,
        about: Mapping[str, Any],
        *,
        start: int | None = None,
        parent: Any = None,
        error: str | None = None,
    ) -> Any:
        """Add a span that ends now, or `seconds` after `start` in nanoseconds if that is earlier."""
        now, nanoseconds = time.time_ns(), int(seconds * 1e9)
        start = now - nanoseconds if start is None else start
        self._ended_at = min(start + nanoseconds, now)
        span = self._tracer.start_span(
            f"jobrunner.{name}",
            context=self._api.set_span_in_context(self._run if parent is None else parent),
            start_time=start,
            attributes={f"jobrunner.{key}": it for key, it in plain_metrics(about).items()},
        )
        if error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, error))
        span.end(end_time=self._ended_at)
        return span
