"""Random jobs give what the documented rules give; `fuzz.py` says how."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from distributed import Client, LocalCluster

from jobrunner import Session
from jobrunner.checkpoint import load_plan
from jobrunner.checkpoint.directory import Directory
from jobrunner.compile import job
from jobrunner.compile.group_compiler import GroupCompiler
from jobrunner.worker import call
from jobrunner.workspace import adopt, pickles, values, workspace
from tests.fuzz.fuzz import TOGETHER, failures, start_workers
from tests.sampling import sampled

EVERYDAY = range(40, 152)
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
    def read(blobs, name):
        value = original(blobs, name)
        return value.copy() if type(value) is np.ndarray else value

    original = call.read
    broken.setattr(call, "read", read)


def inputs_share_their_containers(broken):
    def read(blobs, name):
        if type(blobs[name]) is not values.Frozen:
            return original(blobs, name)
        frozen = blobs[name]
        return opened.setdefault(id(frozen), (frozen, original(blobs, name)))[1]

    original, opened = call.read, {}
    broken.setattr(call, "read", read)


def an_update_gets_memory_that_others_have(broken):
    def make_writable(holder, key):
        if not holder[key].flags.owndata:
            return original(holder, key)
        holder[key].flags.writeable = True

    original = values._make_writable
    broken.setattr(values, "_make_writable", make_writable)


def a_result_shares_memory_with_inputs_and_caches(broken):
    broken.setattr(values, "_is_sole", lambda array, references: array.flags.owndata)


def an_updated_blob_keeps_what_was_put_into_it(broken):
    class Update(list):
        pass

    def begin(self, value):
        self.box = Update([value])

    def settle(box, *place):
        if type(box) is not Update:
            return original(box, *place)
        box[0] = adopt(box[0])
        return box[0]

    original = call.settle
    broken.setattr(workspace.Taken, "__init__", begin)
    broken.setattr(call, "settle", settle)


def ties_come_apart(broken):
    original = values.Frozen.open

    def apart(self, parts):
        value = original(self, parts)
        return [copy.deepcopy(item) for item in value] if type(value) is list else value

    broken.setattr(values.Frozen, "open", apart)


def pickling_swaps_bytes(broken):
    broken.delitem(pickles._REDUCERS, np.ndarray)


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


def a_load_takes_the_epoch_before(broken):
    record = Directory.record

    def record_before(self, at, snapshot):
        earlier = [epoch for epoch in snapshot.epochs if epoch < at]
        return record(self, max(earlier, default=at), snapshot)

    broken.setattr(Directory, "record", record_before)


def what_has_another_name_is_loaded_under_it(broken):
    begin = load_plan._LoadPlan.__init__

    def forgets(self, directory, record, sources):
        begin(self, directory, record, {key: key for key in sources})

    broken.setattr(load_plan._LoadPlan, "__init__", forgets)


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
