"""The messages that a worker answers. They may come from anyone who can reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import msgspec

# Increase it with every change of the messages: a client then leaves out workers of other versions.
PROTOCOL_VERSION = 13
OPERATION = f"jobrunner_call_{PROTOCOL_VERSION}"

Message = dict[str, Any]
Frames = Annotated[Sequence[Any], msgspec.Meta(min_length=1)]
RunValues = Sequence[tuple[int, Sequence[tuple[int, Frames]]]]
"""Items ``(run number, [(crossing, frames), ...])``."""
Number = Annotated[int, msgspec.Meta(ge=1)]
"""Of an operation or a run."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # not NaN: it would upset a loop's timers


class EndedRun(TypedDict):
    """One run's result on this worker, as the client gets it."""

    stopped: list[str]  # the stop conditions that were true
    metrics: str  # JSON text
    seconds: Seconds  # since the previous run ended or the batch began


class CaptureRhythm(msgspec.Struct, frozen=True):
    """Which epochs the keepers of a binding capture as they end: those whose numbers `stride` divides."""

    stride: Number

    def covers(self, epoch: int) -> bool:
        """Whether an epoch is captured."""
        return epoch % self.stride == 0

    def epochs_before(self, epoch: int) -> int:
        """How many epochs, from `epoch` on, come before the next one that is captured."""
        return -epoch % self.stride


class RunOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the client asks of each worker: to run a group once, or for a batch of epochs."""

    key: str = ""  # of the group
    epoch: int | None = None  # of the first run; None outside a runner
    step: int = 0  # of the first run
    epochs: Number = 1  # at most
    steps_per_epoch: Number = 1  # runs in an epoch; a batch ends after a whole epoch
    lead: str = ""  # address of the worker that leads a batch
    is_judged: bool = False  # the group has stop conditions
    seconds: Seconds = 0.0  # no epoch is granted after this time
    rhythm: CaptureRhythm | None = None  # None: no epoch is captured


class BindingMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="call"):
    """A message to a binding, and what its sender knows of that."""

    binding: str
    lease: str = ""  # that must run before this is answered


class OperationMessage(BindingMessage):
    """Starts the operation of that number, or asks for its reply if it has started.

    No message waits for long: the answer is "running" after that time.
    """

    number: Number
    wait_seconds: Seconds


class RunMessage(OperationMessage, tag="run"):
    """Runs a group that was shipped."""

    order: RunOrder | None = None


class ApplyMessage(OperationMessage, tag="apply"):
    """Calls the pickled ``fn(hosted_nodes)`` in a thread; one at a time on each channel."""

    fn: bytes = b""
    channel: str = "apply"


class PushMessage(BindingMessage, tag="push"):
    """Values and notes from another worker."""

    values: RunValues


class AbortMessage(BindingMessage, tag="abort"):
    """Starts nothing more of the batch with a run of that number."""

    number: int
    reason: str


class ReleaseMessage(BindingMessage, tag="release"):
    """Ends the binding."""


AnyMessage = RunMessage | ApplyMessage | PushMessage | AbortMessage | ReleaseMessage
