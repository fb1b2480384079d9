"""A real browser for tests: Debian's Chromium, driven by Playwright; tests are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Return the path of Chromium, or skip the test."""
    found = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here; install it (Debian: apt-get install chromium) or set CHROMIUM")
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser."""
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers lack; the pages are our own.
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page whose errors and dialogs fail the test: content that runs would show up here."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._dismiss)
        page.on("console", self._note)

    def _dismiss(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note(self, message: ConsoleMessage) -> None:
        # A status of a page that the test asks for is no error of the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(f"console: {message.text}")
