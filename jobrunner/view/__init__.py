"""What workers tell views of a run: what tasks print, and how many have ended."""

from jobrunner.view.prints import Where, names_of
from jobrunner.view.watcher import Watcher
