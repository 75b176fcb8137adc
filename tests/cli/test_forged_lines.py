"""No text of a stranger's directory begins a line of its own in what commands print or log."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobrunner import JobRunnerError, MultiNodeCheckpointManager
from jobrunner.checkpoint.log.entries import Holder, Process, parse_entry
from jobrunner.story import read_story
from tests.cli.directories import invoke
from tests.mutants.mutations import places, value_at
from tests.mutants.seeds import Seed, make_seeds
from tests.mutants.trees import Odd, dump, frame_entry, split_entry, write_tree
from tests.sampling import sampled

FORGED = "forged: all is well"
EVIL = f"x\n{FORGED}\x1b[31m"
JOB = """
from tests.mutants.seeds import job_of

job = job_of({nodes!r}, {shared!r})
"""


def fields(entry: Any) -> Iterator[tuple[str, tuple[Any, ...], bool]]:
    """The texts of an entry: a name for all that are alike, where, and whether it is a key."""
    for trail in places(entry):
        if not trail:
            continue
        names = [it for it in trail if isinstance(it, str)]
        if isinstance(value_at(entry, trail), str):
            yield names[-1], trail, False
        if isinstance(trail[-1], str) and len(trail) > 1:
            yield f"keys of {names[-2]}", trail, True


def plant(entry: Any, name: str) -> Any:
    """The entry with our text in all such places."""
    entry = copy.deepcopy(entry)
    for found, trail, is_key in [*fields(entry)][::-1]:
        if found == name:
            inside = value_at(entry, trail[:-1])
            if is_key:
                inside[f"{trail[-1]}{EVIL}"] = inside.pop(trail[-1])
            else:
                inside[trail[-1]] = EVIL
    return entry


def is_read(entry: Any) -> bool:
    try:
        parse_entry(entry, "it")
    except JobRunnerError:
        return False
    return True


@pytest.fixture(scope="module")
def seed() -> Seed:
    return make_seeds(("two_runs",))[0]


def check(seed: Seed, entries: dict[str, Any], path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Run all commands on a directory with these entries; returns what they say."""
    tree = {**seed.tree, **{name: frame_entry(dump(it)) for name, it in entries.items()}}
    tree[f"stray\n{FORGED}"] = tree[f"_log/stray\n{FORGED}"] = b""
    tree[f"more/{EVIL}/_log"] = Odd("directory")
    write_tree(tree, str(path))
    write_tree(seed.tree, f"{path}.whole")
    job = path.parent / "job.py"
    job.write_text(JOB.format(nodes=dict(seed.nodes), shared=dict(seed.shared)))
    told = []
    for command in (
        ("ls", path),
        ("ls", path / "more"),
        ("info", path, 1),
        ("report", path, "-o", f"{path}.html"),
        ("compare", path, f"{path}.whole"),
        ("compare", f"{path}.whole", path),
        ("verify", path),
        ("diff", f"{path}@0", "@1"),
        ("run", job, "--checkpoint", path, "--dry-run"),
        ("run", job, "--checkpoint", path, "--resume", 0, "--dry-run"),
        ("run", job, "--checkpoint", f"{path}{EVIL}", "--dry-run"),
        ("fsck", path),
        ("copy", path, "all", f"{path}.copy"),
        ("pin", path, 1),
        ("unpin", path, 1),
        ("restore", path, 2),
        ("prune", path, "--keep-last", 1),
        ("fsck", path, "--repair"),
    ):
        result = invoke(*command)
        assert "Usage" not in result.output, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        told.append(f"{command}\n{result.output}")
    told += [it.getMessage() for it in caplog.records]
    text = "\n".join(told)
    lines = [line for line in text.splitlines() if line.strip().startswith(FORGED[:6])]
    assert not lines, (lines, text[max(0, text.index(lines[0]) - 500) :][:800])
    for made in (path, Path(f"{path}.whole"), Path(f"{path}.copy")):
        shutil.rmtree(made, ignore_errors=True)
    return text


def _entries(seed: Seed) -> dict[str, Any]:
    return {
        name: split_entry(content)
        for name, content in seed.tree.items()
        if name.startswith("_log/") and isinstance(content, bytes)
    }


def test_no_text_of_a_record_begins_a_line(
    seed: Seed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All texts at once that still let the log be read."""
    entries = _entries(seed)
    planted = set()
    for name in dict.fromkeys(name for it in entries.values() for name, *_ in fields(it)):
        if name in ("store", "manifest"):
            continue  # of which nothing could be read
        forged = {at: plant(entry, name) for at, entry in entries.items()}
        if all(map(is_read, forged.values())):
            write_tree({at: frame_entry(dump(it)) for at, it in forged.items()}, f"{tmp_path}/try")
            try:
                read_story(tmp_path / "try")
                MultiNodeCheckpointManager(tmp_path / "try").history()
            except JobRunnerError:
                pass
            else:
                entries = forged
                planted.add(name)
            shutil.rmtree(tmp_path / "try")
    assert {"time", "job", "host", "label", "keys of structure", "keys of metrics"} <= planted
    with caplog.at_level(logging.INFO, "jobrunner"):
        told = check(seed, entries, tmp_path / "runs", caplog)
    assert told.count("forged") > 10


@sampled("count", sample=1, nightly=99)
def test_no_text_begins_a_line_of_an_error(
    count: int, seed: Seed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of text alone, whether or not the log can then be read."""
    entries = _entries(seed)
    names = dict.fromkeys(name for it in entries.values() for name, *_ in fields(it))
    for name in ["store", *names][:count]:
        forged = {at: plant(entry, name) for at, entry in entries.items()}
        check(seed, forged, tmp_path / "runs", caplog)


def test_the_holder_of_a_directory_is_named_in_one_line() -> None:
    process = Process(host=EVIL, pid=1)
    holder = Holder(number=0, run="r", time=EVIL, process=process)
    assert len(str(holder).splitlines()) == 1
    assert "\\x1b" in str(holder)
