"""What of its run a recorded checkpoint contains: whole epochs, and steps of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def steps_in(record: Mapping[str, Any]) -> int:
    """How many steps of its epoch a recorded checkpoint contains; 0: all."""
    step = record["details"].get("step", 0)
    return step if type(step) is int and step > 0 else 0


def describe_position(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorded checkpoint contains, as JSON: whole epochs, and steps of the next one."""
    epoch, step = record["epoch"], steps_in(record)
    count = record["details"].get("steps_per_epoch") if step else None
    return {
        "epoch": epoch,
        "whole_epochs": epoch - bool(step),
        "step": step,
        "steps_per_epoch": count if type(count) is int else None,
    }


def name_position(record: Mapping[str, Any]) -> str:
    """Name an epoch, and the step if the checkpoint is mid-epoch, for a message."""
    at = describe_position(record)
    if not at["step"]:
        return f"epoch {at['epoch']}"
    whole = f"{at['whole_epochs']} whole epoch{'' if at['whole_epochs'] == 1 else 's'}"
    return f"epoch {at['epoch']}, {name_step(at)} ({whole})"


def name_step(at: Mapping[str, Any]) -> str:
    """Name the step of a mid-epoch checkpoint."""
    count = at["steps_per_epoch"]
    return f"step {at['step']}" + ("" if count is None else f" of {count}")
