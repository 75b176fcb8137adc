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
            again = _load(self.codec, saved)
            assert type(again) is type(value)
            assert again == value, f"expected {value!r}, found {again!r}"
            _same(saved, _save(self.codec, again))

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


def _same(one: EncodedBlob, other: EncodedBlob) -> None:
    assert_identical(one.tree, other.tree, "what was saved")
    arrays = [[part.data for part in blob.parts] for blob in (one, other)]
    assert_identical(arrays[0], arrays[1], "arrays")
