"""Signals that arrive while the block that handles them ends, and signals that are ignored."""

import signal
import sys
import threading

import pytest

from jobrunner.signals import TerminatedError, stop_on_signals


@pytest.fixture
def outer():
    """Signals that reach the handler that was set before the block."""
    reached = []

    def handle(number, frame):
        reached.append(number)

    handle.is_replaceable = True
    before = signal.signal(signal.SIGTERM, handle)
    yield reached
    assert signal.signal(signal.SIGTERM, before) is handle


def terminate_as_it_ends():
    """Send SIGTERM while the block ends: where it calls `Event.set`."""

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is threading.Event.set.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(profile)


def test_a_first_signal_after_the_block_goes_to_the_previous_handler(outer):
    asked = []
    with stop_on_signals(asked.append):
        terminate_as_it_ends()
    assert (asked, outer) == ([], [signal.SIGTERM])


def test_a_second_signal_after_the_block_changes_nothing(outer):
    asked = []
    with stop_on_signals(asked.append):
        signal.raise_signal(signal.SIGTERM)
        terminate_as_it_ends()
    assert (asked, outer) == (["SIGTERM"], [])


def test_the_grace_period_ends_the_block_and_nothing_after_it(outer):
    def terminate_and_wait(name):
        threading.Event().wait(20)

    with pytest.raises(TerminatedError), stop_on_signals(terminate_and_wait, grace_seconds=0.01):
        signal.raise_signal(signal.SIGTERM)
    assert outer == []


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
