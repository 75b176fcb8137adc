"""What of its run a recorded checkpoint contains: whole epochs, and steps of the next one.

Earlier versions recorded a mid-epoch checkpoint under the number of the epoch in progress: as
epoch 7, with step 3 in its details, where later ones record `Position(6, 3)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobrunner.positions import step_of


def steps_in(record: Mapping[str, Any]) -> int:
    """How many steps a recorded checkpoint contains besides whole epochs; 0: none."""
    if step := step_of(record["epoch"]):
        return step
    step = record["details"].get("step", 0)
    return step if type(step) is int and step > 0 else 0


def whole_epochs(record: Mapping[str, Any]) -> int:
    """How many whole epochs a recorded checkpoint contains."""
    epoch: int = record["epoch"]
    return int(epoch) - is_old_form(record)


def is_old_form(record: Mapping[str, Any]) -> bool:
    """Whether it is a mid-epoch checkpoint under the number of the epoch in progress."""
    return bool(steps_in(record)) and not step_of(record["epoch"])


def describe_position(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorded checkpoint contains; ``epoch`` is what the log calls it."""
    step = steps_in(record)
    count = record["details"].get("steps_per_epoch") if step else None
    return {
        "epoch": record["epoch"],
        "whole_epochs": whole_epochs(record),
        "step": step,
        "steps_per_epoch": count if type(count) is int else None,
    }


def name_position(record: Mapping[str, Any]) -> str:
    """Name an epoch, and the step if the checkpoint is mid-epoch, for a message."""
    at = describe_position(record)
    if not at["step"]:
        return f"epoch {at['epoch']}"
    whole = f"{at['whole_epochs']} whole epoch{'' if at['whole_epochs'] == 1 else 's'}"
    return f"epoch {at['epoch']} ({whole} and {name_step(at)})"


def name_step(at: Mapping[str, Any]) -> str:
    """Name the step of a mid-epoch checkpoint."""
    count = at["steps_per_epoch"]
    return f"step {at['step']}" + ("" if count is None else f" of {count}")
