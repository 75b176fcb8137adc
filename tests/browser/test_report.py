"""The report in a browser: on wide and narrow screens, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobrunner.story import to_page
from tests.browser.conftest import check_accessible, check_width
from tests.story.stories import make_story

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_page(make_story(40, text=" a-long-word" * 9)), encoding="utf-8")
    return path.as_uri()


def test_everyone_can_read_the_report_on_every_screen(
    open_page: Callable[[str], Any], address: str
) -> None:
    page = open_page(address)
    check_width(page)
    check_accessible(page)


def test_the_report_draws_losses_resumes_and_where_time_went(
    open_page: Callable[[str], Any], address: str
) -> None:
    page = open_page(address)
    for mark in ("svg path.loss", "svg path.resume", ".bar .compute"):
        box = page.locator(mark).first.bounding_box()
        assert box["height"] > 5, mark
    chart = page.locator("figure").first
    assert chart.locator("path.curve").bounding_box()["width"] > 100


def test_the_report_has_the_colours_that_its_reader_prefers(
    open_page: Callable[[str], Any], address: str
) -> None:
    page = open_page(address)
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(colour.removeprefix("rgb(").split(",")[0])
    assert (red < 60) if is_dark else (red > 200)
