"""The documentation's pages on a phone, and their search."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import check_width

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx_book_theme", reason="pip install -e '.[docs]'")
    made = tmp_path_factory.mktemp("site")
    docs = Path(__file__).parents[2] / "docs"
    command = ["-m", "sphinx", "-q", "-W", "-b", "html", "-d", made / "cache", docs, made / "html"]
    subprocess.run([sys.executable, *map(str, command)], check=True)
    return made / "html"


@pytest.mark.timeout(240)
def test_every_page_fits_a_phone(browser, site):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.parts:
            page.goto(path.as_uri())
            check_width(page)
    page.close()


def test_the_search_finds_what_is_typed(browser, site):
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("KeepBest")
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a").first
    found.wait_for()
    assert "KeepBest" in found.inner_text()
    page.close()
