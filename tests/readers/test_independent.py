"""docs/format.md suffices to read a checkpoint directory: a reader written by it alone does."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from jobrunner import (
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
)
from jobrunner.checkpoint.store.chunks import plan_chunks
from jobrunner.cli import main
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, assert_identical
from tests.readers.independent import load, recorded

_GOLDEN = sorted(
    path.parent for path in (Path(__file__).parents[1] / "golden").glob("**/_log") if path.is_dir()
)


def make():
    shared = [1, 2]
    return {
        "columns last": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
        "big-endian": np.arange(3, dtype=">i4"),
        "texts": np.array(["a", "bcd"]),
        "nothing": np.zeros((0, 3)),
        "many": {f"p{i}": np.full(5, i) for i in range(70)},  # stacked
        "pairs": [(f"k{i}", i / 2) for i in range(600)],
        "lists": [[i, str(i)] for i in range(300)],
        "ragged": {i: [i] * (i % 4) for i in range(300)},
        "sets": [{i, -1 - i} for i in range(300)],
        "nested": [{"id": i, "at": [i, i / 2]} for i in range(300)],
        "scalars": list(np.arange(600, dtype="f4")),
        "records": np.array([(1, [2.0, 3.0])], [("a", "i2"), ("b", "f8", 2)]),
        "tied": [shared, (shared, b"\0"), {"n": None, "inf": float("inf"), 3: -(2**80)}],
    }


def test_a_run_is_read_as_it_was_saved(tmp_path: Path) -> None:
    with Job("made") as job, Node("a"):
        with job.init_group:
            Task(make, outputs="values")
            Task(lambda: np.arange(10_000.0).reshape(50, 200), outputs="cut")
        Task(lambda cut: cut + 1, outputs="cut")
    epoch_limiter(job, 4)
    manager = MultiNodeCheckpointManager(tmp_path, keep=KeepLast(2))
    with Session.local(workers=1, processes=False) as session:
        JobRunner(job, manager).run(session)
    assert list(recorded(tmp_path)) == [3, 4]
    assert_identical(load(tmp_path)["a"]["values"], make())
    assert_identical(load(tmp_path, 3)["a"]["cut"], manager.open(3)["a"].load("cut"))
    tied = load(tmp_path)["a"]["values"]["tied"]
    assert tied[0] is tied[1][0]


def test_a_long_log_is_read_after_a_repair(tmp_path: Path) -> None:
    with Job("long") as job, Node("a"):
        with job.init_group:
            Task(int, outputs="n")
        Task(lambda n: n + 1, outputs="n")
    epoch_limiter(job, 66)
    files = FaultyFiles(sync=False)
    manager = MultiNodeCheckpointManager(tmp_path, files=files, keep=KeepLast(40))
    with Session.local(workers=1, processes=False) as session:
        JobRunner(job, manager).run(session)
    manager.pin(27, "paper")
    before = recorded(tmp_path)
    assert list(before) == list(range(27, 67))
    commits = manager.directory.snapshot().recorded
    numbers = {at: commits[at] for at in (Position(30), Position(66))}
    first, second = (tmp_path / "_log" / f"{number:010}.json" for number in numbers.values())
    first.unlink()
    second.write_bytes(b"damaged")
    assert CliRunner().invoke(main, ["fsck", str(tmp_path), "--repair"]).exit_code == 0
    assert sorted(recorded(tmp_path)) == MultiNodeCheckpointManager(tmp_path).epochs()
    assert load(tmp_path, 30) == {"a": {"n": 30}}
    assert load(tmp_path) == {"a": {"n": 66}}


def test_arrays_in_many_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(plan_chunks, limit=12_000)
    monkeypatch.setattr("jobrunner.checkpoint.store.layout.plan_chunks", small)
    values = {
        "rows": np.arange(9_000).reshape(90, 100),
        "columns": np.arange(9_000.0).reshape(100, 90).T,
    }
    with Job("cut") as job, Node("a"):
        with job.init_group:
            Task(lambda: values, outputs="values")
        Task(lambda: None)
    epoch_limiter(job, 1)
    with Session.local(workers=1, processes=False) as session:
        JobRunner(job, MultiNodeCheckpointManager(tmp_path)).run(session)
    assert len(list((tmp_path / "a.1").glob("values/rows/c.*"))) > 3
    assert_identical(load(tmp_path)["a"]["values"], values)


@pytest.mark.parametrize("directory", _GOLDEN, ids=lambda path: path.name)
def test_golden_directories_are_read_or_refused(directory: Path) -> None:
    manager = MultiNodeCheckpointManager(directory)
    assert sorted(map(str, recorded(directory))) == sorted(map(str, manager.epochs()))
    epoch = manager.epochs()[-1]
    try:
        found = load(directory)
    except ValueError as error:
        assert "does not know" in str(error)  # noqa: PT017 - as the page says that a reader should
        return
    checkpoint = manager.open(epoch)
    for node, blobs in found.items():
        for name, value in blobs.items():
            assert_identical(value, checkpoint[node].load(name))
