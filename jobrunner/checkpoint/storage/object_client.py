"""Opens an object store, with credentials of the environment, and says how requests are repeated."""

from __future__ import annotations

import datetime as dt
import functools
import os
from typing import TYPE_CHECKING

from jobrunner.config import get_number

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

RETRY_KEY = "checkpoint.retry-seconds"
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 5.0


def _retrying() -> RetryConfig:
    """How obstore tries again what got no answer: for a time, however often."""
    return {
        "max_retries": 1_000_000,
        "retry_timeout": dt.timedelta(seconds=get_number(RETRY_KEY)),
        "backoff": {
            "init_backoff": dt.timedelta(seconds=PAUSE_SECONDS),
            "max_backoff": dt.timedelta(seconds=LONGEST_PAUSE_SECONDS),
            "base": 2,
        },
    }


@functools.cache
def open_store(root: str) -> ObjectStore:
    """The objects below a URL, with the credentials of this process's environment.

    Cached by URL, so that a process shares connections and the content of ``memory://``.
    """
    from obstore.store import MemoryStore, from_url

    if root.startswith("memory://"):
        return MemoryStore()
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if root.startswith("az://") and account:
        # obstore panics when it prints a store whose account it found by itself.
        return from_url(root, account_name=account, retry_config=_retrying())
    return from_url(root, retry_config=_retrying())
