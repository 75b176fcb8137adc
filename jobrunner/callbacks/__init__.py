"""Callbacks for `JobRunner(callbacks=[...])`: logs, early stopping, and other trackers of runs."""

from jobrunner.callbacks.early_stopping import EarlyStopping
from jobrunner.callbacks.logs import CSVLog, JSONLinesLog
