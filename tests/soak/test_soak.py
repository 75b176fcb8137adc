"""A minute of kills every night; `soak.py` goes on for as long as it is told to."""

import subprocess
import sys

import pytest

from tests.soak import soak


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_whatever_is_killed_no_recorded_epoch_is_lost_and_no_bit_differs():
    command = [sys.executable, soak.__file__, "--minutes", "1", "--every", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
