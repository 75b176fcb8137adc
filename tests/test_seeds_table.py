"""The table of docs/seeds.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_named_in_the_table_exists() -> None:
    text = (ROOT / "docs" / "seeds.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 30
    for path, test in named:
        file = ROOT / path
        assert file.exists(), path
        assert not test or f"def {test}(" in file.read_text(), f"{path}::{test}"
