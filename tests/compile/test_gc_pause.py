"""The garbage collector is paused inside the blocks only, and then as it was before."""

import gc
import threading

import pytest

from jobrunner.compile.gc_pause import gc_paused


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_restored_also_after_an_error(is_on):
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_paused(), gc_paused():
            {}[gc.isenabled()]
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


def test_the_last_pause_to_end_restores_the_collector():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with gc_paused():
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=hold)
    with gc_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join(10)
    assert gc.isenabled()
