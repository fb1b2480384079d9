"""A real browser for tests: Debian's Chromium, driven by Playwright; tests are skipped where it is not installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, ViewportSize, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0
expect.set_options(timeout=WAIT_S * 1000)
AXE = Path(__file__).parents[2] / "tests" / "integration" / "axe-core" / "axe.min.js"
SCREENSHOTS = os.environ.get("CONSOLE_SCREENSHOTS")
"""A folder for screenshots of pages, including those of docs/console.md; without it none are saved."""
_RENAME = """([from, to]) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) walker.currentNode.data = walker.currentNode.data.replaceAll(from, to);
}"""
DESKTOP, PHONE = ViewportSize(width=1280, height=800), ViewportSize(width=390, height=800)


def chromium() -> str:
    """Return the path of Chromium, or skip the test."""
    found = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("Chromium is not installed; install it (Debian: apt-get install chromium) or set CHROMIUM")
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # The sandbox needs privileges that containers lack; the pages are our own.
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page whose errors and dialogs fail the test, which would reveal injected scripts."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._dismiss)
        page.on("console", self._record_error)

    def _dismiss(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _record_error(self, message: ConsoleMessage) -> None:
        # An error status that the test provokes is not an error of the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(f"console: {message.text}")


def open_page(browser: Browser, address: str, **context: Any) -> WatchedPage:
    watched = WatchedPage(browser.new_context(reduced_motion="reduce", **context).new_page())
    watched.page.set_default_timeout(WAIT_S * 1000)
    watched.page.goto(address)
    return watched


def save_screenshot(page: Page, name: str, *, folder: Path | None = None) -> None:
    """Save a screenshot for docs/console.md, with a neutral name for the test's folder."""
    if SCREENSHOTS:
        if folder is not None:
            page.evaluate(_RENAME, [str(folder), "/var/lib/millstream"])
        page.screenshot(path=f"{SCREENSHOTS}/console-{name}.png")


def check_appearance(page: Page, name: str = "", *, schemes: Sequence[Any] = ("light", "dark")) -> None:
    """Check that the page is accessible in its themes and fits on a phone; with a name, take a screenshot of each."""
    page.set_viewport_size(DESKTOP)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        # The themes differ in their colours only.
        checked = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] if scheme == "light" else ["color-contrast"]
        found = page.evaluate("rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})", checked)
        violations = [
            (violation["id"], [node["html"][:200] for node in violation["nodes"]][:3])
            for violation in found["violations"]
        ]
        assert violations == [], (page.url, scheme, violations)
        _save_theme_screenshot(page, name, scheme)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), page.url
    _save_theme_screenshot(page, name, "phone")
    page.set_viewport_size(DESKTOP)


def _save_theme_screenshot(page: Page, name: str, theme: str) -> None:
    if SCREENSHOTS and name:
        folder = Path(SCREENSHOTS, "themes")
        folder.mkdir(exist_ok=True)
        page.screenshot(path=folder / f"{name}-{theme}.png", full_page=True)
