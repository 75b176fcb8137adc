"""The pause of the garbage collector."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobrunner.gc_pause import gc_paused


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(KeyError), gc_paused(), gc_paused():
        {}[gc.isenabled()]
    assert gc.isenabled()


def test_the_collector_is_on_again_after_pauses_of_several_threads():
    def pause_often():
        for _ in range(10_000):
            with gc_paused():
                assert not gc.isenabled()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            for ended in [pool.submit(pause_often) for _ in range(3)]:
                ended.result()
        assert gc.isenabled()
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
