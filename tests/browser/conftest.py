"""A browser, and pages in it at the sizes and colours that users have."""

import shutil

import pytest

_BAD = ("error", "warning")
_HERE = ("file:", "data:", "blob:", "http://127.0.0.1:")
SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def browser():
    """Chromium: that of the system, or else the one that playwright installed."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"there is no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(params=SCREENS, ids=lambda it: f"{it[0]}-{it[1]}")
def open_page(browser, request):
    """Opens an address on each screen; warnings, errors and requests elsewhere fail the test."""
    width, colours = request.param
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=colours, offline=False
    )
    said = []

    def open_page(address):
        page = context.new_page()
        page.on("console", lambda it: said.append(it.text) if it.type in _BAD else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda it: None if it.url.startswith(_HERE) else said.append(it.url))
        page.goto(address)
        return page

    yield open_page
    context.close()
    assert not said


def check_accessible(page):
    """Fail with what axe-core finds wrong with the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page)
    assert not found.violations_count, found.generate_report()


def check_width(page):
    """Fail if the page is wider than the screen."""
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
