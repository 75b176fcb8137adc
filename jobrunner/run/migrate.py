"""Call the user's function that makes blobs of a job from an older checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobrunner.checkpoint import Loader
from jobrunner.compile import Plan
from jobrunner.errors import CheckpointError, PlanMismatchError
from jobrunner.positions import Position
from jobrunner.run.matching import Adaptation


def migrated(
    adaptation: Adaptation, plan: Plan, manager: Loader, epoch: Position
) -> dict[str, dict[str, Any]]:
    """What `migrate` makes of a checkpoint: node -> blob -> value; nothing if it is not called.

    Raises `PlanMismatchError` if it raises, or returns anything but saved blobs of the job.
    """
    if adaptation.migrate is None or not adaptation.migrates(manager.directory.record(epoch)):
        return {}
    where = f"migrate={adaptation.migration}, for epoch {epoch} of {manager.path}"
    try:
        made = adaptation.migrate(manager.open(epoch))
    except CheckpointError:  # of reading, which says what to do
        raise
    except Exception as error:
        raise PlanMismatchError(
            f"{where}: it raised {type(error).__name__}: {error}. Nothing was loaded or written. "
            f"Correct it, and run again."
        ) from error
    expected = f"{where}: expected a mapping of nodes to mappings of blobs to values, found"
    if not isinstance(made, Mapping):
        raise PlanMismatchError(f"{expected} {type(made).__name__}.")
    saved = plan.saved_blobs(epoch)
    found: dict[str, dict[str, Any]] = {}
    for node, blobs in made.items():
        if not isinstance(blobs, Mapping):
            raise PlanMismatchError(f"{expected} {type(blobs).__name__} for node {node!r}.")
        for name, value in blobs.items():
            if name not in saved.get(node, ()):
                there = ", ".join(map(repr, sorted(saved.get(node, saved))))
                raise PlanMismatchError(
                    f"{where}: it returned blob {name!r} of node {node!r}, which job {plan.job!r} "
                    f"does not save. Expected {'blobs' if node in saved else 'nodes'} among {there}."
                )
            # An array of the checkpoint, which is read only now.
            is_lazy = any(it.__module__.startswith("zarr.") for it in type(value).__mro__)
            found.setdefault(node, {})[name] = value[...] if is_lazy else value
    return found
