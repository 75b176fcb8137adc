"""Show a run while it runs: one model of its state, and the ways to draw it."""

from jobrunner.view.dashboard import IS_SHOWN, RUNS, OnDashboard
from jobrunner.view.html import age
from jobrunner.view.html import draw as draw_html
from jobrunner.view.live import Live
from jobrunner.view.show import show_lines, show_on, show_run
from jobrunner.view.state import RunState
