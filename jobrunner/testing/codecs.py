"""The contract of codecs: derive a test class, set the codec and values, run pytest.

Example
-------
::

    class TestFractions(CodecContract):
        codec = register_codec(Fraction, lambda f: f.as_integer_ratio(), lambda t: Fraction(*t))
        values = (Fraction(1, 3), Fraction(0))
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import cloudpickle

from jobrunner.checkpoint import Codec, Decoder, EncodedBlob, encode_blobs
from jobrunner.testing.identity import assert_identical


class CodecContract:
    """What every `Codec` must do. Values are compared with ``==``, and by their encoding."""

    codec: Codec
    values: Sequence[Any] = ()

    def test_there_are_values_of_exactly_its_type(self) -> None:
        """A codec is chosen by the exact type, not by a base class."""
        assert self.values, "give some values"
        for value in self.values:
            assert type(value) is self.codec.cls, f"{value!r} is no {self.codec.cls.__name__}"

    def test_what_was_saved_comes_back(self) -> None:
        """With the same type, equal, and with the same encoding."""
        for value in self.values:
            saved = _save(self.codec, value)
            again = _load(self.codec, saved)
            assert type(again) is type(value)
            assert again == value, f"expected {value!r}, found {again!r}"
            _same(saved, _save(self.codec, again))

    def test_encoding_changes_nothing(self) -> None:
        """A value may be saved at any epoch, also twice, and the job continues with it."""
        for value in self.values:
            first = _save(self.codec, value)
            kept = EncodedBlob(
                copy.deepcopy(first.tree), [copy.deepcopy(part) for part in first.parts]
            )
            _same(kept, _save(self.codec, value))

    def test_workers_can_use_it(self) -> None:
        """They receive it by cloudpickle."""
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

    return Decoder(array, [codec], where="the value").decode(blob.tree)


def _same(one: EncodedBlob, other: EncodedBlob) -> None:
    assert_identical(one.tree, other.tree, "what was saved")
    arrays = [[part.data for part in blob.parts] for blob in (one, other)]
    assert_identical(arrays[0], arrays[1], "arrays")
