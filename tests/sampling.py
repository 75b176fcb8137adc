"""Sweeps try a sample with every run of the tests, and everything with ``pytest -m nightly``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

NIGHTLY_TIMEOUT_SECONDS = 2 * 3600
EVERYDAY_EXAMPLES, NIGHTLY_EXAMPLES = 100, 1000


def sampled(names: str, *, sample: Any, nightly: Any) -> pytest.MarkDecorator:
    """Parametrize a test twice: with the values of a small sample, and with those of all cases.

    ::

        @sampled("every_kth", sample=19, nightly=1)
        def test_an_error_at_any_operation(every_kth): ...
    """
    values = (sample, nightly) if "," in names else ([sample], [nightly])
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*values[0], id="sample"),
            pytest.param(*values[1], id="nightly", marks=pytest.mark.nightly),
        ],
    )


def examples(everyday: int, *, nightly: int | None = None) -> int:
    """How many examples Hypothesis draws for a test that needs more or fewer than others.

    Nightly, ten times as many unless told otherwise.
    """
    times = settings().max_examples // EVERYDAY_EXAMPLES
    return nightly if nightly is not None and times > 1 else everyday * times
