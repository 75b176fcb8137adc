"""The garbage collector is held off only while somebody asks, and left as it was."""

import gc
import threading

import pytest

from jobrunner.compile.gc_pause import gc_paused


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_left_as_it_was_also_after_an_error(is_on):
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_paused(), gc_paused():
            {}[gc.isenabled()]
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


def test_the_last_thread_to_leave_turns_it_on():
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
