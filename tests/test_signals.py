"""Signals that arrive while the block that handles them ends, and signals that are ignored."""

import signal
import sys
import threading

import pytest

from jobrunner.signals import TerminatedError, stop_on_signals, terminated_as_interrupt


def test_a_second_signal_ends_the_block_and_one_after_it_changes_nothing():
    asked = []
    with terminated_as_interrupt():
        with pytest.raises(TerminatedError), stop_on_signals(asked.append):
            [signal.raise_signal(number) for number in 2 * [signal.SIGTERM]]
        with stop_on_signals(asked.append):
            terminate_as_it_ends()
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)  # the handler of before is back
    assert asked == ["SIGTERM"]


def terminate_as_it_ends():
    """Send SIGTERM while the block ends: where it calls `Event.set`."""

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is threading.Event.set.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(profile)


def test_the_grace_period_ends_the_block_and_nothing_after_it():
    def terminate_and_wait(name):
        threading.Event().wait(20)

    with (
        terminated_as_interrupt(),
        pytest.raises(TerminatedError),
        stop_on_signals(terminate_and_wait, grace_seconds=0.01),
    ):
        signal.raise_signal(signal.SIGTERM)


def test_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = []
    try:
        with stop_on_signals(asked.append):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == []
