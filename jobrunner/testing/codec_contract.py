"""The contract of codecs: derive a test class, set the codec and values, run pytest.

Examples
--------
>>> from fractions import Fraction
>>> class TestFractions(CodecContract):
...     codec = register_codec(Fraction, lambda f: f.as_integer_ratio(), lambda t: Fraction(*t))
...     values = (Fraction(1, 3), Fraction(0))
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import cloudpickle

from jobrunner.checkpoint import Codec, CodecTable, Decoder, EncodedBlob, encode_blobs
from jobrunner.testing.identity import assert_identical


class CodecContract:
    """What every `Codec` must do, shown with `values`; they must support ``==``."""

    codec: Codec
    """What is tested."""
    values: Sequence[Any] = ()
    """Of exactly its type."""

    def test_values_have_exactly_its_type(self) -> None:
        """A codec is chosen by the exact type; by a base class only with ``subclasses=True``."""
        assert self.values, "set `values` to some values of that type"
        for value in self.values:
            is_its = CodecTable([self.codec]).get(type(value)) is self.codec
            assert is_its, f"{value!r} is not of type {self.codec.cls.__name__}"

    def test_a_saved_value_loads_unchanged(self) -> None:
        """It has the same type, is equal, and has the same encoding."""
        for value in self.values:
            saved = _save(self.codec, value)
            loaded = _load(self.codec, saved)
            assert type(loaded) is type(value)
            assert loaded == value, f"expected {value!r}, found {loaded!r}"
            _same(saved, _save(self.codec, loaded))

    def test_encoding_changes_nothing(self) -> None:
        """A job continues with a value that was saved, and may save it again."""
        for value in self.values:
            first = _save(self.codec, value)
            before = EncodedBlob(copy.deepcopy(first.tree), copy.deepcopy(first.parts))
            _same(before, _save(self.codec, value))

    def test_workers_can_use_it(self) -> None:
        """They receive it through cloudpickle."""
        sent: Codec = cloudpickle.loads(cloudpickle.dumps(self.codec))
        assert sent.name == self.codec.name
        for value in self.values:
            assert sent.decode(sent.encode(value)) == value


def _save(codec: Codec, value: object) -> EncodedBlob:
    return encode_blobs("node", {"blob": value}, [codec])["blob"]


def _load(codec: Codec, blob: EncodedBlob) -> Any:
    def array(i: int) -> Any:
        part = blob.parts[i]
        if part.order is None:
            return part.data.copy()
        return part.data.transpose([part.order.index(axis) for axis in range(part.data.ndim)])

    return Decoder(array, [codec], where="the value", classes=blob.classes).decode(blob.tree)


def _same(expected: EncodedBlob, actual: EncodedBlob) -> None:
    assert_identical(expected.tree, actual.tree, "what was saved")
    arrays = [part.data for part in expected.parts]
    assert_identical(arrays, [part.data for part in actual.parts], "arrays")
