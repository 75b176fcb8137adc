"""The pause of the garbage collector."""

import gc

import pytest

from jobrunner.gc_pause import gc_paused


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(KeyError), gc_paused(), gc_paused():
        {}[gc.isenabled()]
    assert gc.isenabled()
