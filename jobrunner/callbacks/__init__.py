"""Callbacks for `JobRunner(callbacks=[...])`: logs, early stopping, and trackers of runs.

Those that need a library import it when they are made.
"""

from jobrunner.callbacks.early_stopping import EarlyStopping
from jobrunner.callbacks.logs import EpochLog
from jobrunner.callbacks.prometheus import Prometheus
from jobrunner.callbacks.trackers import MLflow, TensorBoard, Track, Tracker, WandB
