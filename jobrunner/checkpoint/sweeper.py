"""Hides and deletes stores that are no longer part of a checkpoint, in the background."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

from jobrunner.checkpoint.log import Claim
from jobrunner.checkpoint.storage import Files, run_all
from jobrunner.checkpoint.store import RETIRED_DOCUMENT, ROOT_DOCUMENT

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 30.0


class _Task(NamedTuple):
    claim: Claim
    action: Literal["delete", "hide"]
    stores: Sequence[str]
    is_final: bool


class Sweeper:
    """Hides and deletes stores that the log has given up, one claim after another.

    Parameters
    ----------
    files : Files
    path : str
        The checkpoint directory.

    Notes
    -----
    The caller has appended the log entry first. What fails is logged and left for the next run.
    The thread ends when there is nothing left to do.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._waiting: deque[_Task] = deque()
        self._removed: list[Claim] = []
        self._settled: list[Claim] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(
        self,
        claim: Claim,
        action: Literal["delete", "hide"],
        stores: Sequence[str],
        *,
        is_final: bool = True,
    ) -> None:
        """Hide, or hide and delete, the stores of a claim; settle it if `is_final`.

        It is not final as long as a slow worker may still write the stores.
        """
        with self._changed:
            self._waiting.append(_Task(claim, action, stores, is_final))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="jobrunner-sweeper", daemon=True
                )
                self._thread.start()

    def confirm(self) -> None:
        """Make the last deletions durable; each task makes those before it durable."""
        with self._changed:
            removed = list(self._removed)
        if removed:
            try:
                self._files.sync_path(self._path)
            except OSError as error:
                logger.warning("What was deleted may come back after a power loss: %s", error)
                return
            self._settle_removed(removed)

    def take_settled(self) -> list[Claim]:
        """The claims whose stores are durably gone or hidden; returns each of them once."""
        with self._changed:
            settled, self._settled = self._settled, []
            return settled

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is left to do, half a minute at most; False if that is too short."""
        seconds = _DRAIN_SECONDS if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._thread is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self._thread is None
        return True

    def _work(self) -> None:
        try:
            while self._settle_next():
                pass
        except BaseException:
            with self._changed:
                self._thread = None
                self._changed.notify_all()
            raise

    def _settle_next(self) -> bool:
        with self._changed:
            if not self._waiting:
                # Under the lock, so that `add` knows whether a thread runs.
                self._thread = None
                self._changed.notify_all()
                return False
            claim, action, stores, is_final = self._waiting.popleft()
            removed = list(self._removed)
        try:
            self._hide(stores, bool(removed))
            self._settle_removed(removed)
            if action == "delete":
                roots = [os.path.join(self._path, store) for store in stores]
                removals = [partial(self._files.remove_tree, root) for root in roots]
                run_all(removals, self._files.removals, 0)
        except OSError as error:
            logger.warning(
                "Stores of epoch %d could not be %s; the next run tries again: %s",
                claim.epoch,
                "deleted" if action == "delete" else "hidden",
                error,
            )
        else:
            if is_final:
                with self._changed:
                    (self._removed if action == "delete" else self._settled).append(claim)
        return True

    def _settle_removed(self, removed: Sequence[Claim]) -> None:
        with self._changed:
            self._removed = [claim for claim in self._removed if claim not in removed]
            self._settled += removed

    def _hide(self, stores: Sequence[str], has_removed: bool) -> None:
        """Hide stores durably before any file is deleted: no store may open with chunks missing.

        Also makes earlier deletions durable.
        """
        changed = [self._path] if has_removed else []

        def hide(root: str) -> None:
            retired = os.path.join(root, RETIRED_DOCUMENT)
            try:
                self._files.rename(os.path.join(root, ROOT_DOCUMENT), retired)
            except (FileNotFoundError, NotADirectoryError):
                # A process that renamed it may have ended before that was durable.
                if not self._files.is_taken(retired):
                    return
            changed.append(root)

        with self._files.durable(self._path, (), changed):
            list(self._files.each(hide, [os.path.join(self._path, store) for store in stores]))
