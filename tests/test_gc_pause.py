"""The pause of the garbage collector."""

import subprocess
import sys

OVERLAPPING = """
import contextlib, gc, sys
from concurrent.futures import ThreadPoolExecutor
from jobrunner.gc_pause import gc_paused

with contextlib.suppress(KeyError), gc_paused(), gc_paused():
    {}[gc.isenabled()]
assert gc.isenabled()

def pause_often():
    for _ in range(10_000):
        with gc_paused():
            assert not gc.isenabled()

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(3) as pool:
    for ended in [pool.submit(pause_often) for _ in range(3)]:
        ended.result()
assert gc.isenabled()
"""


def test_the_collector_is_on_again_after_errors_and_pauses_of_several_threads():
    # In a process of its own: threads that other tests have left may pause the collector.
    subprocess.run([sys.executable, "-c", OVERLAPPING], check=True)
