"""The contract of codecs: one that passes, and broken ones that fail."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from jobrunner.checkpoint import Codec
from jobrunner.testing.codec_contract import CodecContract


class TestFractions(CodecContract):
    codec = Codec(Fraction, lambda f: f.as_integer_ratio(), lambda t: Fraction(*t), "fraction")
    values = (Fraction(1, 3), Fraction(-(2**70), 7))


@dataclass
class Table:
    rows: list[float]


class TestArrays(CodecContract):
    codec = Codec(Table, lambda t: {"x": np.array(t.rows)}, lambda d: Table(d["x"].tolist()), "t")
    values = (Table([0.5, 1.5]), Table([]))


class Broken(CodecContract):
    values = (Table([0.5, 1.5]),)


CASES = {
    "test_values_have_exactly_its_type": Codec(Fraction, str, Fraction, "other"),
    "test_a_saved_value_loads_unchanged": Codec(
        Table, lambda t: t.rows[:1], lambda rows: Table(list(rows)), "loses"
    ),
    "test_encoding_changes_nothing": Codec(
        Table, lambda t: (t.rows.append(0.0), list(t.rows))[1], Table, "changes"
    ),
    "test_workers_can_use_it": Codec(Table, lambda t: t.rows, lambda rows: None, "gives none"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_codec_fails_the_contract(name: str) -> None:
    broken = Broken()
    broken.codec = CASES[name]
    broken.values = (Table([0.5, 1.5]),)
    with pytest.raises(AssertionError):
        getattr(broken, name)()
