"""Names on disk: every name is read back as it was, and none leaves the directory."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner import DefinitionError
from jobrunner.names import (
    check_distinct,
    check_name,
    escape,
    format_store_name,
    parse_store_name,
    unescape,
)
from jobrunner.positions import Position
from jobrunner.texts import printable


def valid(name):
    try:
        check_name(name, "node")
    except DefinitionError:
        return False
    return True


positions = st.builds(Position, st.integers(0, 10**6), st.integers(0, 3))
names = st.text(min_size=1, max_size=20).filter(valid)


@given(names, positions, st.integers(0, 99))
def test_a_store_name_parses_back_to_its_parts(node, epoch, retry):
    assert parse_store_name(format_store_name(node, epoch, retry)) == (node, epoch, retry)


@given(names)
def test_an_escaped_name_is_one_plain_path_component(name):
    text = escape(name)
    assert unescape(text) == name
    assert not set(text) & set('/\\<>"|?*\0')
    assert text not in (".", "..", "zarr.json", "c")
    assert not text.startswith((".", "_"))
    assert len(text.encode()) <= 200


@pytest.mark.parametrize("text", ["a", "a.", ".5", "a.05", "a.-1", "a.5.r0", "_log.5", "a/b.5", ""])
def test_other_names_do_not_parse(text):
    assert parse_store_name(text) is None


def test_names_that_a_file_system_may_fold_are_refused():
    check_distinct(["a", "b", "a"], "nodes")
    with pytest.raises(DefinitionError, match=r"'Node' and 'node'|'node' and 'Node'"):
        check_distinct(["Node", "node"], "nodes")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at s3://a:b@c/d and ws://h:1/?t=x.", "at s3://…@c/d and ws://h:1/?…"),
        ("at s3://AK:se/cr+et@bucket/d", "at s3://…@bucket/d"),
        ("https://u:p@h/x?sig=a&b=c, then", "https://…@h/x?… then"),
        ("s3://bucket/name@3 and tcp://10.0.0.1:8786, x@y", None),
        ("<Client: 'tcp://127.0.0.1:1'>: what? a@b #3", None),
        ("memory://a/b@4", None),
        ("file:///data/a%40b or s3://bucket/a:b@c/d or /data/a@b:/c or runs/x@3", None),
        ("a jobrunner_script_my_job.Model, whose", "a my_job.py:Model, whose"),
        ("<jobrunner_script_job:Outer.Inner object>", "<job.py:Outer.Inner object>"),
        ("my_jobrunner_script_job", None),
        ("see https://distributed.dask.org/en/stable/faq.html#what", None),
    ],
)
def test_texts_have_no_credentials_in_urls_and_files_by_their_own_names(text, shown):
    assert printable(text) == (text if shown is None else shown)


@pytest.mark.parametrize("part", ["://:a", "@://a:b", "?://a", "ab:/"])
def test_no_text_makes_the_search_for_credentials_slow(part):
    before = time.process_time()
    printable(part * 20_000 + "@")
    assert time.process_time() - before < 1


@given(st.text(max_size=50))
def test_a_printable_text_has_nothing_that_a_terminal_obeys(text):
    shown = printable(text)
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert printable(shown) == shown
    assert printable(text, kept="").isprintable()
