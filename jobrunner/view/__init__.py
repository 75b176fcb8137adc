"""Show a run while it runs: one model of its state, and the ways to draw it."""

from jobrunner.view.live import Live
from jobrunner.view.show import show_lines, show_on, show_run
from jobrunner.view.state import RunState
