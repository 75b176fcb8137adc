"""Callbacks for `JobRunner(callbacks=[...])`: logs, early stopping, and trackers of runs.

Those that need a library import it when they are made.
"""

from jobrunner.callbacks.early_stopping import EarlyStopping
from jobrunner.callbacks.logs import CSVLog, JSONLinesLog
from jobrunner.callbacks.mlflow import MLflow
from jobrunner.callbacks.opentelemetry import OpenTelemetry
from jobrunner.callbacks.prometheus import Prometheus
from jobrunner.callbacks.tensorboard import TensorBoard
from jobrunner.callbacks.trackio import Trackio
