"""The report in a browser: on wide and narrow screens, light and dark."""

import pytest

from jobrunner.story import to_page
from tests.browser.conftest import check_accessible, check_width
from tests.story.stories import make_story

pytestmark = pytest.mark.browser


def test_everyone_can_read_the_report_on_every_screen(open_page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(to_page(make_story(40, text=" a-long-word" * 9)), encoding="utf-8")
    page = open_page(path.as_uri())
    check_width(page)
    check_accessible(page)
    for mark in ("svg path.loss", "svg path.resume", ".bar .compute"):
        box = page.locator(mark).first.bounding_box()
        assert box["height"] > 5, mark
    assert page.locator("figure path.curve").first.bounding_box()["width"] > 100
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(colour.removeprefix("rgb(").split(",")[0])
    assert (red < 60) if is_dark else (red > 200)
