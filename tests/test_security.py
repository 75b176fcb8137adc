"""The page on security names the tests of its rules."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_on_security_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 10
    for path, test in named:
        file = ROOT / path
        assert file.exists(), path
        assert not test or f"def {test}(" in file.read_text(), f"{path}::{test}"
