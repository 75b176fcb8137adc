"""Stores that are not part of any checkpoint: hidden or deleted, in the background."""

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


class _Chore(NamedTuple):
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
    The log entry comes first: whoever calls has appended it. What fails is logged and left for
    the next run. The thread lives as long as there is something to do.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._waiting: deque[_Chore] = deque()
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
        """Let the stores of a claim be hidden, or hidden and deleted.

        Parameters
        ----------
        claim : Claim
        action : "delete" or "hide"
        stores : sequence of str
        is_final : bool
            Whether nobody can write them any more; if not, the claim is not settled by this.
        """
        with self._changed:
            self._waiting.append(_Chore(claim, action, stores, is_final))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="jobrunner-sweeper", daemon=True
                )
                self._thread.start()

    def confirm(self) -> None:
        """Make durable what was deleted since the last chore made all before it durable."""
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
        """The claims that nothing is left to do for, whatever happens; each is given out once."""
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
                # Under the lock, so that who adds to the queue knows whether a thread is there.
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
                "Stores of epoch %d could not be %s, and are left for the next run: %s",
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
        """Hide stores; durable before anything goes, so that none opens with chunks missing.

        What was removed before this began is then gone for good as well.
        """
        changed = [self._path] if has_removed else []

        def hide(root: str) -> None:
            retired = os.path.join(root, RETIRED_DOCUMENT)
            try:
                self._files.rename(os.path.join(root, ROOT_DOCUMENT), retired)
            except (FileNotFoundError, NotADirectoryError):
                # Whoever renamed it may have ended before that was durable.
                if not self._files.is_taken(retired):
                    return
            changed.append(root)

        with self._files.durable(self._path, (), changed):
            list(self._files.each(hide, [os.path.join(self._path, store) for store in stores]))
