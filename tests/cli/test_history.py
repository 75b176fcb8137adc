"""`report`: the page of what runs did."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from jobrunner.cli import main


def test_a_report_is_written_where_one_asks(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", str(runs), "-o", str(page), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"path": str(runs), "report": str(page)}
    assert "<h2>Checkpoints</h2>" in page.read_text()


def test_a_page_that_cannot_be_written_is_an_error_without_a_traceback(runs: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(runs), "-o", str(runs)])
    assert done.exit_code == 8
    assert "Error: " in done.stderr
    assert str(runs) in done.stderr
