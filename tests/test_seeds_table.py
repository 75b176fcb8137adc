"""The tables that name tests name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


SCENARIOS = "docs/coming-from/scenarios.md"


@pytest.mark.parametrize(
    ("document", "least"), [("docs/seeds.md", 30), (SCENARIOS, 70), ("SECURITY.md", 10)]
)
def test_every_test_named_in_the_table_exists(document: str, least: int) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > least
    for path, test in named:
        file = ROOT / path
        assert file.exists(), path
        assert not test or f"def {test}(" in file.read_text(), f"{path}::{test}"
