"""The lists of defects can be read; nightly, each defect is noticed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter

import pytest

from tests.defects.defects import ROOT, read_defects


def test_each_defect_is_listed_once_and_is_python() -> None:
    defects = read_defects()
    twice = Counter((defect.file, defect.line, defect.broken) for defect in defects)
    assert {key: count for key, count in twice.items() if count > 1} == {}
    assert all(defect.rule and defect.tests for defect in defects)
    for defect in defects:
        path = ROOT / defect.file
        broken = defect.break_line(path.read_text()) if path.is_file() else None
        if broken is not None:  # else it is stale, which `defects.py` tells
            ast.parse(broken)


@pytest.mark.nightly
def test_every_defect_is_noticed() -> None:
    command = [sys.executable, "tests/defects/defects.py", "--processes", "2"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
