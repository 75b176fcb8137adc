"""A document is read as its type says, or is an error that names file and field."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated

import msgspec
import pytest

from jobrunner import CheckpointCorruptError
from jobrunner.checkpoint.encoding.schema import convert, parse


class Part(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=0)]
    names: tuple[str, ...] = ()


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    part: Part


def read(text: str | bytes, path: str, advice: str = "") -> Whole:
    return convert(parse(text, path, advice=advice), Whole, path, advice=advice)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"part": {"size": "1"}}', r"Expected `int`, got `str` - at `\$\.part\.size`"),
        ('{"part": {}}', r"missing required field `size` - at `\$\.part`"),
        ('{"part": {"size": 1, "more": 2}}', r"unknown field `more` - at `\$\.part`"),
        ('{"part": {"size": -1}}', r"`int` >= 0 - at `\$\.part\.size`"),
        ('{"part": {"size": true}}', r"got `bool` - at `\$\.part\.size`"),
        ('{"part": {"size": 1, "names": ["a", null]}}', r"at `\$\.part\.names\[1\]`"),
        ('{"part": {"size": 1, "size": 2}}', "the key 'size' appears twice"),
        ('{"part": {"size": NaN}}', "NaN is not a JSON number"),
        ('{"part": {"size": ' + "9" * 5000 + "}}", "5,000 digits; expected at most 1,000"),
        ("", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        ("[]", "Expected `object`, got `array`"),
    ],
)
def test_an_invalid_document_is_an_error_that_names_file_and_field(text, told):
    with pytest.raises(CheckpointCorruptError, match=told) as caught:
        read(text, "run/_log/1.json", "Restore it.")
    assert str(caught.value).startswith("run/_log/1.json ")
    assert str(caught.value).endswith("Restore it.")


def test_a_document_is_read_as_its_type_says():
    assert read(b'{"part": {"size": 3}}', "p") == Whole(Part(3))


def test_an_integer_may_have_a_thousand_digits_and_a_string_any():
    text = json.dumps({"seed": -(10**999), "digits": "1" * 9000}, separators=(",", ":"))
    assert parse(text.encode(), "p", advice="") == json.loads(text)
    with pytest.raises(
        CheckpointCorruptError, match=r"^p is .* 1,001 digits; expected at most 1,000"
    ):
        parse(b'{"seed":[%d]}' % 10**1000, "p", advice="")


READ_AT_ONCE = """
import sys, threading, msgspec
from jobrunner.checkpoint.encoding import convert

sys.setswitchinterval(1e-6)
numbers = {f"f{i}": i for i in range(20)}
data = {"one": numbers, "many": [], "named": {}}
for _ in range(30):
    part = msgspec.defstruct("Part", [(name, int) for name in numbers])
    fields = [("one", part), ("many", list[part]), ("named", dict[str, part])]
    kind, gate = msgspec.defstruct("Whole", fields), threading.Barrier(6)

    def read():
        gate.wait()
        convert(data, kind, "a.json", advice="")

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_be_the_first_to_read_a_document_at_the_same_time() -> None:
    subprocess.run([sys.executable, "-c", READ_AT_ONCE], check=True, timeout=60)
