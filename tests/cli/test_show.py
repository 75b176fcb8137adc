"""`ls` and `info` of a checkpoint directory: what they say, and what they read for it."""

import os
from fractions import Fraction

import numpy as np
import pytest

from jobrunner import MultiNodeCheckpointManager, register_codec
from jobrunner.checkpoint import Directory
from jobrunner.checkpoint.log.log_writer import STATE_INTERVAL
from jobrunner.cli.show import list_epochs
from jobrunner.cli.tables import join_cells
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, FaultyObjects
from tests.checkpoint.encoding.kinds_of_values import Unset
from tests.cli.directories import ask, begin, invoke, save
from tests.saves import save_epoch

LARGE = 1 << 20
RAN = "JOBRUNNER_TEST_RAN"


# --- ls


def test_ls_shows_each_epoch_and_whether_the_job_has_finished(runs):
    assert invoke("pin", runs, 1, "--label", "paper").exit_code == 0
    result = invoke("ls", runs)
    assert result.exit_code == 0
    header, *rows, _, end, last = result.stdout.splitlines()
    assert header.split() == ["EPOCH", "SAVED", "NODES", "SIZE", "TIME", "PINNED", "METRICS"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[1].split()[-2:] == ["paper", "loss=1"]
    assert (end, last) == ("The job has not finished.", "The last run has ended.")
    told = ask("ls", runs)
    assert (told["path"], told["is_done"], told["runs"]) == (str(runs), False, [])
    assert [epoch["epoch"] for epoch in told["epochs"]] == [0, 1, 2, 3]
    assert told["epochs"][2]["metrics"] == {"loss": None}  # it is NaN


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A directory of many epochs of a job without nodes."""
    path = tmp_path_factory.mktemp("runs")
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start([], {})
    for epoch in range(200):
        save_epoch(manager, Position.of(epoch), details={"metrics": {"loss": 1 / (epoch + 1)}})
    manager.run.end()
    return path


def test_ls_reads_the_records_that_it_lists_once_and_the_end_of_the_log(long):
    for last, listed in ((None, 200), (20, 20)):
        files = FaultyObjects("s3://bucket/runs", long)
        output = list_epochs(Directory(files.root, files=files), last)
        assert [row["epoch"] for row in output.data["epochs"]] == list(range(200 - listed, 200))
        reads = [path for operation, path in files.trace if operation in ("get", "head")]
        # The entries since the last full state, and as many that an object store reads ahead.
        assert len(reads) <= listed + 2 * STATE_INTERVAL
    assert "The newest 20 of 200 epochs." in output.text


def test_sizes_are_those_that_the_disk_takes_and_frees(tmp_path):
    path = tmp_path / "linked"
    manager = begin(path)
    save(manager, 0, {"large": np.arange(LARGE / 8)})
    for epoch in (1, 2):
        save(manager, epoch)
        for node in "ab":  # what both epochs share
            (path / f"{node}.{epoch}" / "large").mkdir()
            for chunk in (path / f"{node}.0" / "large").iterdir():
                os.link(chunk, path / f"{node}.{epoch}" / "large" / chunk.name)
    manager.run.end()
    assert 2 * LARGE <= ask("ls", path)["disk_nbytes"] < 3 * LARGE
    dry = ask("prune", path, "--keep-last", 1, "--dry-run")
    assert dry["nbytes"] > 2 * LARGE
    assert 0 < dry["freed_nbytes"] < LARGE  # the last epoch still has the large arrays
    assert "\nfreed on the disk: " in invoke("prune", path, "--keep-last", 1).stdout
    assert ask("ls", path)["disk_nbytes"] >= 2 * LARGE


# --- info


def record(path, *blobs):
    manager = begin(path, allow_pickle=True)
    for epoch, values in enumerate(blobs):
        save(manager, epoch, values)
    manager.run.end()


def test_info_shows_the_record_and_the_blobs_as_they_are(tmp_path):
    blobs = {
        "scalar": np.array(3.5),
        "fields": np.zeros(4, [("a", ">i4"), ("b", "f4")]),
        "nested": {"layers": [np.ones(5), np.zeros((2, 2), ">i2")], "n": 1},
        "text": "x" * 100,
    }
    record(tmp_path, blobs)
    text = invoke("info", tmp_path, "latest").stdout
    for part in (
        f"epoch 0 of {tmp_path}\n",
        "metrics loss=3.0\n",
        "  scalar  array  float64                              3.5\n",
        "  fields  array  [('a', '>i4'), ('b', '<f4')]  4\n",
        "{'layers': [float64[5], >i2[2 x 2]], 'n': 1}\n",
    ):
        assert part in text, text
    assert max(map(len, text.splitlines())) < 110
    told = ask("info", tmp_path, 0)
    assert (told["epoch"], told["nodes"]["a"]["store"]) == (0, "a.0")
    found = told["nodes"]["a"]["blobs"]
    assert found["scalar"] == {"type": "array", "shape": [], "dtype": "float64", "value": "3.5"}
    assert found["text"]["value"] == repr("x" * 100)
    missing = invoke("info", tmp_path, 7)
    assert (missing.exit_code, "recorded epochs: 0" in missing.stderr) == (6, True)


class Tells:
    """Unpickling it leaves a trace."""

    def __init__(self, number):
        self.number = number

    def __setstate__(self, state):
        os.environ[RAN] = "1"
        vars(self).update(state)


def test_info_shows_values_of_classes_and_codecs_without_running_them(tmp_path):
    codec = register_codec(
        Fraction, lambda f: [f.numerator, np.full(3, f.denominator)], lambda pair: 1 / 0
    )
    values = {"p": Tells(1), "f": Fraction(1, 2), "unset": Unset(), "long": 10**5000}
    record(tmp_path, values, {**values, "p": Tells(2), "long": 10**5001})
    blobs = ask("info", tmp_path, 0)["nodes"]["a"]["blobs"]
    assert (blobs["p"]["type"], blobs["long"]["type"]) == ("pickle", "int")
    assert blobs["f"] == {"type": f"codec {codec.name}", "value": "[1, int64[3]]"}
    assert blobs["unset"]["value"] == "{'y': 1}"  # what is set
    result = invoke("diff", f"{tmp_path}@0", "@1")
    assert "a/p: the pickles or the order of keys differ" in result.stdout
    assert "a/long: " in result.stdout
    assert RAN not in os.environ


def test_a_directory_that_holds_others_names_them(runs, tmp_path):
    for command in (["info", tmp_path, "latest"], ["diff", tmp_path, runs], ["report", tmp_path]):
        result = invoke(*command)
        assert result.exit_code == 6
        assert "contains checkpoint directories: runs" in result.output


def test_a_table_that_is_too_wide_continues_below_each_row():
    columns = [["RUN", "a  "], ["STATE  ", "stopped"], ["METRICS ", "loss=0.1"], ["AT", "7 "]]
    assert join_cells(columns, 26) == ["RUN  STATE    METRICS   AT", "a    stopped  loss=0.1  7"]
    assert join_cells(columns, 20) == [
        "RUN  STATE",
        "      METRICS   AT",
        "a    stopped",
        "      loss=0.1  7",
    ]
