"""Tools for a directory that no run is using: copy, inspect, repair."""

from jobrunner.checkpoint.maintenance.copy import (
    copy_epoch,
    copy_files,
    copy_root,
    find_copied,
    restore_epoch,
)
from jobrunner.checkpoint.maintenance.inspect import inspect_directory
from jobrunner.checkpoint.maintenance.repair import Repair, plan_repair, repair_log
