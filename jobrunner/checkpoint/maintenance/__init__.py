"""Tools for a directory that no run is using: copy, inspect, repair."""

from __future__ import annotations

from jobrunner.checkpoint.maintenance.copy import copy_epoch, find_set_aside, restore_epoch
from jobrunner.checkpoint.maintenance.inspect import Finding, inspect_directory
from jobrunner.checkpoint.maintenance.repair import repair_log
from jobrunner.checkpoint.maintenance.repair_plan import Repair, plan_repair

__all__ = [
    "Finding",
    "Repair",
    "copy_epoch",
    "find_set_aside",
    "inspect_directory",
    "plan_repair",
    "repair_log",
    "restore_epoch",
]
