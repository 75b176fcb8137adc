"""The client's side of Dask: sessions, placement, messages to workers."""

from __future__ import annotations

from jobrunner.cluster.session import DEFAULT_WAIT_SECONDS, Binding, GroupResult, Session
from jobrunner.cluster.session_binding import SessionBinding

__all__ = ["DEFAULT_WAIT_SECONDS", "Binding", "GroupResult", "Session", "SessionBinding"]
