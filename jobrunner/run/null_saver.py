"""The saver of a run that saves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobrunner.worker import CaptureRhythm


class NullSaver:
    """Replaces the `Saver` of a run without a checkpoint manager."""

    can_save = False
    is_asked = must_retry = False

    def start(self, *args: object, **options: object) -> None:
        """Do nothing."""

    end = set_aside = rewind = finish = save = save_captured = start
    poll = make_room = wait = wait_unreported = wait_quietly = start

    def epochs_until(self, epoch: int) -> int | None:
        """No save limits the length of a batch of epochs."""

    def capture_rhythm(self) -> CaptureRhythm | None:
        """No epoch is captured."""

    def is_due(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> bool:
        """No save is ever due."""
        return False
