"""Random jobs give what the documented rules give; `fuzz.py` says how."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.fuzz import TOGETHER, failures, three_workers
from tests.sampling import sampled

EVERYDAY = range(40, 152)
"""As few as notice all defects of `tests/defects/lists/workspace.toml`."""


@sampled("count", sample=len(EVERYDAY), nightly=6_000)
def test_random_jobs_follow_the_documented_rules(count):
    first = EVERYDAY.start
    if count > len(EVERYDAY):
        first = random.SystemRandom().randrange(1 << 30) // TOGETHER * TOGETHER
    with three_workers() as cluster:
        found = failures(cluster, range(first, first + count))
    for seed, wrong in found.items():
        pytest.fail(f"{wrong}\nRepeat it: python tests/fuzz/fuzz.py --seed {seed}", pytrace=False)
