"""The client's side of Dask: sessions, placement, messages to workers."""

from jobrunner.cluster.binding import Binding
from jobrunner.cluster.session import Session
