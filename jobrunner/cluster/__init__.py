"""The client's side of Dask: sessions, placement, messages to workers."""

from __future__ import annotations

from jobrunner.cluster.binding import Binding
from jobrunner.cluster.session import Session

__all__ = ["Binding", "Session"]
