"""Runs that are stopped by their program, Ctrl-C or SIGTERM."""

import errno
import os
import signal
import threading
import time

import pytest

from jobrunner import (
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    RunStoppedError,
    SaveEvery,
    current_task,
)
from jobrunner.checkpoint.storage.posix import PosixFiles
from tests.jobs import At, counter


@pytest.fixture
def manager(tmp_path):
    return MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)


def test_a_stopped_run_has_recorded_its_epoch_and_can_be_resumed(inproc_session, manager):
    runner = JobRunner(counter(8), manager, callbacks=[At(3, lambda: runner.stop("enough"))])
    with pytest.raises(RunStoppedError, match="stopped on request") as caught:
        runner.run(inproc_session)
    assert (caught.value.reason, caught.value.epoch, manager.latest()) == ("enough", 3, 3)
    assert "the same command again to resume from epoch 3" in str(caught.value)
    result = runner.run(inproc_session)  # what was asked then does not count now
    assert (result.resumed_from, result.epoch, inproc_session.fetch(Node("a")["n"])) == (3, 8, 8)


class AskedLater(JobRunner):
    """Is asked to stop just before a run looks for the n-th time whether it was."""

    looks, n = 0, 0

    @property
    def stop_reason(self):
        self.looks += 1
        return "later" if self.looks > self.n else ""

    @stop_reason.setter
    def stop_reason(self, reason):
        pass


@pytest.mark.parametrize("n", [3, 4])
def test_whenever_it_is_asked_a_stopped_run_has_recorded_its_epoch(inproc_session, tmp_path, n):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(epochs=100))
    runner = AskedLater(counter(8), manager, callbacks=[At(100, None)])
    runner.n = n
    with pytest.raises(RunStoppedError) as caught:
        runner.run(inproc_session)
    assert manager.latest() == caught.value.epoch > 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_lets_the_epoch_end(inproc_session, manager, name):
    told = []
    listener = At(2, lambda: signal.raise_signal(signal.Signals[name]))
    listener.on_stop_asked = lambda reason, at_once: told.append(reason)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunStoppedError, match=name) as caught:
        JobRunner(counter(8), manager, callbacks=[listener]).run(inproc_session)
    assert (caught.value.reason, manager.latest()) == (name, 2)
    assert told == [name]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


let_go, heard = threading.Event(), threading.Event()


@pytest.fixture
def hung():
    """Tasks that hang do so until the test is over."""
    let_go.clear()
    heard.clear()
    yield
    let_go.set()


def hang(n):
    if current_task().epoch == 3:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        let_go.wait(40)
    return n + 1


class Again:
    def on_epoch(self, epoch, seconds, metrics):
        """Epochs run one by one."""

    def on_stop_asked(self, reason, at_once):
        assert at_once == "Ctrl-C again"
        main = threading.main_thread().ident
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()


def test_the_second_ctrl_c_does_not_wait_for_the_epoch(inproc_session, manager, hung):
    with pytest.raises(KeyboardInterrupt):
        JobRunner(counter(8, hang), manager, callbacks=[Again()]).run(inproc_session)
    assert manager.latest() == 2


class Hears:
    def on_stop_asked(self, reason, at_once):
        heard.set()


def interrupt_this_thread(n):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    heard.wait(20)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    let_go.wait(20)


def test_a_signal_that_interrupts_no_wait_is_heard_soon(inproc_session, hung):
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        JobRunner(counter(8, interrupt_this_thread), callbacks=[Hears()]).run(inproc_session)
    assert time.monotonic() - began < 10


def terminate_and_hang(n):
    if current_task().epoch == 3:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        let_go.wait(40)
    return n + 1


def test_after_sigterm_the_grace_period_ends_an_epoch_that_takes_longer(
    inproc_session, manager, hung
):
    runner = JobRunner(counter(8, terminate_and_hang), manager, grace_seconds=0.3)
    with pytest.raises(RunStoppedError, match="no more time") as caught:
        runner.run(inproc_session)
    assert (caught.value.reason, manager.latest()) == ("SIGTERM", 2)
    result = JobRunner(counter(8), manager).run(inproc_session)
    assert (result.resumed_from, inproc_session.fetch(Node("a")["n"])) == (2, 8)


def stop_in_step_2(n):
    task = current_task()
    if (task.epoch, task.step) == (2, 1) and task.attempt == 0 and n == 5:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    return n + 1


def test_a_job_of_several_steps_stops_between_two_of_them(inproc_session, manager):
    job = counter(3, stop_in_step_2, steps_per_epoch=4)
    with pytest.raises(RunStoppedError, match="step 2 of epoch 2") as caught:
        JobRunner(job, manager).run(inproc_session)
    assert caught.value.epoch == 1
    JobRunner(counter(3, steps_per_epoch=4), manager).run(inproc_session)
    assert inproc_session.fetch(Node("a")["n"]) == 12


def test_without_a_checkpoint_a_job_of_several_steps_ends_its_epoch(inproc_session):
    class AtStep:
        def on_step(self, epoch, step, seconds, metrics):
            if (epoch, step) == (2, 2):
                runner.stop()

    runner = JobRunner(counter(3, steps_per_epoch=4), callbacks=[AtStep()])
    with pytest.raises(RunStoppedError, match="its epoch has ended") as caught:
        runner.run(inproc_session)
    assert (caught.value.epoch, inproc_session.fetch(Node("a")["n"])) == (2, 8)


class Unplugged(PosixFiles):
    """Storage that fails once it is unplugged."""

    is_gone = False

    def before(self, operation, path):
        if Unplugged.is_gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_a_stopped_run_says_so_even_if_storage_is_gone(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", files=Unplugged(), asynchronous=False)

    def stop():
        Unplugged.is_gone = True
        runner.stop("enough")

    runner = JobRunner(counter(8), manager, callbacks=[At(3, stop)])
    try:
        with pytest.raises(RunStoppedError, match=r"enough.*cannot be read now.*Input/output"):
            runner.run(inproc_session)
    finally:
        Unplugged.is_gone = False
    assert JobRunner(counter(8), manager).run(inproc_session).resumed_from == 2


class Stuck(PosixFiles):
    """Storage that does not answer for the store of an epoch."""

    def before(self, operation, path):
        if "a.2" in path and operation == "mkdir":
            let_go.wait(60)


def test_the_second_ctrl_c_leaves_a_save_that_hangs_to_the_next_run(
    inproc_session, tmp_path, monkeypatch, caplog, hung
):
    monkeypatch.setattr("jobrunner.run.saver.PATIENCE_SECONDS", 0.2)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", files=Stuck())
    with pytest.raises(KeyboardInterrupt):
        JobRunner(counter(8, hang), manager, callbacks=[Again()]).run(inproc_session)
    assert "A save is still under way after 0.2 s" in caplog.text
    assert manager.latest() == 1
