"""The client's side of Dask: sessions, placement, messages to workers."""

from jobrunner.cluster.binding import Binding
from jobrunner.cluster.connection import run_in_thread
from jobrunner.cluster.environment import COMMAND, describe_environment
from jobrunner.cluster.results import GroupResult, UnderWay
from jobrunner.cluster.session import Session
