"""The pause of the garbage collector."""

import gc

import pytest

from jobrunner.gc_pause import gc_paused


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_restored_also_after_an_error(is_on):
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_paused(), gc_paused():
            {}[gc.isenabled()]
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
