"""Random jobs give what the documented rules give; `fuzz.py` says how."""

from __future__ import annotations

import random

import numpy as np
import pytest
from distributed import Client, LocalCluster

from jobrunner import Session
from jobrunner.checkpoint.loader import Loader, Origins
from jobrunner.compile import job
from jobrunner.compile.group import GroupCompiler
from jobrunner.worker import call
from jobrunner.workspace import copies, kept_states, pickles, values
from tests.fuzz.fuzz import TOGETHER, failures, start_workers
from tests.sampling import sampled

EVERYDAY = range(88, 200)
"""As few as notice all that is broken below."""


@pytest.fixture(scope="module")
def cluster():
    with start_workers() as cluster:
        yield cluster


def failing(cluster: LocalCluster, seeds: range, *, most: int = 1) -> dict[int, str]:
    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        return failures(session, seeds, most=most)


@sampled("count", sample=len(EVERYDAY), nightly=6_000)
def test_random_jobs_follow_the_documented_rules(cluster, count):
    first = EVERYDAY.start
    if count > len(EVERYDAY):
        first = random.SystemRandom().randrange(1 << 30) // TOGETHER * TOGETHER
    for seed, wrong in failing(cluster, range(first, first + count)).items():
        pytest.fail(f"{wrong}\nRepeat it: python tests/fuzz/fuzz.py --seed {seed}", pytrace=False)


# ---- what it would notice: the package, broken at one place


def input_arrays_can_be_written(broken):
    broken.setattr(values, "_read_only", lambda array: array.view())


def inputs_share_their_containers(broken):
    broken.setattr(call, "view", lambda value, known=None: value)
    broken.setattr(call, "view_small", lambda value: None)


def an_update_gets_memory_that_others_have(broken):
    broken.setattr(call, "own", lambda holder, key, copy: holder[key])


def a_result_shares_memory_with_inputs_and_caches(broken):
    broken.setattr(call, "settle", lambda *args, **kwargs: None)


def an_updated_blob_keeps_what_was_put_into_it(broken):
    broken.setattr(call, "_settle_updates", lambda step, arguments: None)


def ties_come_apart(broken):
    copied = copies._copied

    def apart(items, memory, made, is_tied):
        return [copied([item], memory, {}, False)[0] for item in items]

    broken.setattr(copies, "_copied", apart)


def pickling_swaps_bytes(broken):
    broken.delitem(pickles._ARRAYS, np.ndarray)


def a_writer_does_not_wait_for_readers(broken):
    write = GroupCompiler._write

    def forgets(self, i, key):
        self._readers.pop(key, None)
        write(self, i, key)

    broken.setattr(GroupCompiler, "_write", forgets)


def a_reader_does_not_wait_for_the_writer(broken):
    read = GroupCompiler._read

    def forgets(self, i, task, value):
        before = set(self._drafts[i].waits_for)
        argument = read(self, i, task, value)
        self._drafts[i].waits_for = before
        return argument

    broken.setattr(GroupCompiler, "_read", forgets)


def recovery_takes_any_kept_state(broken):
    def recall(self, node, identity, names):
        for save in self._saves.values():
            kept = save.states.get(node, {})
            return {name: kept_states._restored(kept[name]) for name in names if name in kept}
        return {}

    broken.setattr(kept_states.KeptStates, "recall", recall)


def a_load_takes_the_epoch_before(broken):
    load = Loader.load
    broken.setattr(
        Loader,
        "load",
        lambda self, epoch, *args, **kwargs: load(self, max(0, epoch - 1), *args, **kwargs),
    )


def what_has_another_name_is_loaded_under_it(broken):
    broken.setattr(Origins, "of", lambda self, node, blob: (node, blob))


def transient_blobs_are_not_made_again(broken):
    broken.setattr(job, "_resumed_tasks", lambda *args: [])


QUICK = [
    input_arrays_can_be_written,
    ties_come_apart,
    a_load_takes_the_epoch_before,
]
MUTANTS = [
    *QUICK,
    an_updated_blob_keeps_what_was_put_into_it,
    inputs_share_their_containers,
    an_update_gets_memory_that_others_have,
    a_result_shares_memory_with_inputs_and_caches,
    recovery_takes_any_kept_state,
    what_has_another_name_is_loaded_under_it,
    transient_blobs_are_not_made_again,
    pickling_swaps_bytes,
    # Their tasks race with each other in this process, and have once kept it busy for ever.
    a_reader_does_not_wait_for_the_writer,
    a_writer_does_not_wait_for_readers,
]


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=[] if mutant in QUICK else pytest.mark.nightly)
        for mutant in MUTANTS
    ],
)
def test_the_everyday_seeds_notice(cluster, monkeypatch, mutant):
    mutant(monkeypatch)
    assert failing(cluster, EVERYDAY)
