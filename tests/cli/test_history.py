"""What `jobrunner stats` and `report` print."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobrunner.cli.tables import format_briefly
from jobrunner.positions import Position
from tests.cli.directories import ask, begin, invoke, save

GOLDEN = Path(__file__).parents[1] / "golden" / "log_1"


def test_stats_shows_the_parts_of_the_time_of_each_run_and_of_all(runs: Path) -> None:
    again = begin(runs)
    again.run.rewind(Position(1), "a try")
    save(again, 2)
    again.run.end()
    found = invoke("stats", runs)
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert lines[0].split() == (
        [
            "RUN",
            "STATE",
            "WALL",
            "COMPUTE",
            "START",
            "SAVES",
            "REDONE",
            "RECOVERY",
            "IDLE",
            "GOODPUT",
        ]
    )
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "all"]
    assert max(map(len, lines)) <= 80
    assert [run["number"] for run in ask("stats", runs, "--last", 1)["runs"]] == [2]


def test_the_figures_of_stats_are_those_of_the_records() -> None:
    found = ask("stats", GOLDEN)
    ledger = found["ledger"]
    parts = ("start", "compute", "save_wait", "redone", "recovery", "idle")
    assert sum(ledger[part] for part in parts) == pytest.approx(ledger["wall"])
    assert (ledger["compute"], ledger["redone"]) == (2.0, 1.5)
    assert found["runs"][0]["losses"] == 1
    assert invoke("stats", GOLDEN).stdout.splitlines()[1].split() == (
        ["1", "finished", "10.0s", "2.0s", "3.0s", "750ms", "1.5s", "1.8s", "1.0s", "19.9%"]
    )


@pytest.mark.parametrize("command", ["stats", "report"])
def test_a_directory_without_runs_is_an_error_that_names_those_below_it(
    runs: Path, command: str
) -> None:
    found = invoke(command, runs.parent)
    assert found.exit_code == 6
    assert "No run has begun in" in found.output
    assert f"It contains checkpoint directories: {runs.name}" in found.output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0"),
        (0.9994, "999ms"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (599.4, "9m59s"),
        (5999, "99m"),
        (6001, "1h40m"),
        (35_999, "9h59m"),
        (99 * 3600, "99h"),
        (1e9, "11574d"),
    ],
)
def test_a_brief_duration_is_short(seconds: float, text: str) -> None:
    assert format_briefly(seconds) == text
