"""The garbage collector is paused inside the blocks only, and then as it was before."""

import gc
import subprocess
import sys
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


UNSEEN = """
import gc, weakref
from functools import partial

from jobrunner.compile import made_unseen
from jobrunner.workspace.contents import survey
from jobrunner.workspace.copies import copy_containers


class Item:
    pass


def dropped():
    item = Item()
    item.own = item
    return weakref.ref(item)


def age(container):
    return next(i for i in range(3) if any(it is container for it in gc.get_objects(i)))


def made(num_made=10_000):
    return made_unseen(partial(list, map(list, [()] * num_made)), num_made)


gc.collect()
for _ in range(5):
    gc.collect(1)
gc.collect(0)
item, looks = dropped(), gc.get_count()[2]
assert age(made()[-1]) == 2
assert item() is None
assert looks <= gc.get_count()[2] <= looks + 1 and gc.isenabled()

for value in ([{i} for i in range(10_000)], [{"a": i, "b": [i]} for i in range(10_000)]):
    known = survey(value).known()
    gc.collect()
    copy = copy_containers(value, None, known)
    assert copy == value and copy[0] is not value[0] and age(copy[-1]) == 2

gc.collect(1)
assert age(made(100)[-1]) == 0
gc.set_threshold(0)
item = dropped()
assert age(made()[-1]) == 0 and item()
gc.set_threshold(700, 10, 1_000_000)
gc.disable()
assert age(made()[-1]) == 0 and item() and not gc.isenabled()
gc.enable()
gc.set_threshold(700, 10, 10)
assert age(made()[-1]) == 2 and not item()
gc.collect()
gc.freeze()
frozen = gc.get_freeze_count()
made()
assert gc.get_freeze_count() == frozen
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="has another collector")
def test_many_copies_become_old_unseen_but_nothing_dropped_does_nor_is_thawed():
    done = subprocess.run([sys.executable, "-c", UNSEEN], capture_output=True, text=True)
    assert not done.returncode, done.stderr
