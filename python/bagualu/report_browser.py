"""Headless Chromium around the report page: pictures for the documents, checks for the tests."""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bagualu.errors import InvalidInput

_CONSOLE = re.compile(r":CONSOLE[:(]\d+")
_MAX_HEIGHT = 16000  # a picture higher than this is of no use, and Chromium's own limit is near


@dataclass(frozen=True)
class Page:
    """What the browser made of a page: the document after scripts ran, and its console lines."""

    dom: str
    console: list[str]


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def load_page(page: str | Path, width: int = 1280, dark: bool = False) -> Page:
    """Loads a local page and waits for its plots.

    Throws: InvalidInput if no Chromium is installed or it fails.
    """
    out, log = _chromium(page, ["--dump-dom", "--enable-logging=stderr", "--v=0"], width, 900, dark)
    return Page(out, [line for line in log.splitlines() if _CONSOLE.search(line)])


def screenshot(page: str | Path, png: str | Path, width: int = 1280, height: int | None = None,
               dark: bool = False) -> None:
    """Writes a picture of a local page; height None means the whole page.

    Units:   width, height in CSS pixels
    Throws:  InvalidInput if no Chromium is installed, or it writes no picture
    """
    if height is None:
        found = re.search(r'data-height="(\d+)"', load_page(page, width, dark).dom)
        height = min(int(found.group(1)) if found else 2400, _MAX_HEIGHT)
    png = Path(png)
    temp = png.with_name(f".{png.name}.{os.getpid()}.png")
    try:
        _chromium(page, [f"--screenshot={temp.resolve()}"], width, height, dark)
        if not temp.exists() or temp.stat().st_size == 0:
            raise InvalidInput(str(page), "screenshot", "no picture", "a page Chromium can draw")
        os.replace(temp, png)
    finally:
        temp.unlink(missing_ok=True)


def _chromium(page: str | Path, options: list[str], width: int, height: int,
              dark: bool) -> tuple[str, str]:
    browser = find_chromium()
    if browser is None:
        raise InvalidInput("chromium", "browser", "none installed", "chromium (apt)")
    with tempfile.TemporaryDirectory(prefix="bagualu-chromium-") as profile:
        # Virtual time ends the run as soon as scripts are idle. The sandbox needs privileges that
        # containers lack; the page is our own and may not use the network.
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   f"--user-data-dir={profile}", "--hide-scrollbars", "--disable-dev-shm-usage",
                   f"--window-size={width},{height}", "--virtual-time-budget=20000", *options]
        if dark:
            command.append("--blink-settings=preferredColorScheme=0")
        command.append(Path(page).resolve().as_uri())
        try:
            done = subprocess.run(command, capture_output=True, timeout=180, check=False)
        except subprocess.TimeoutExpired as error:
            raise InvalidInput(browser, "browser", "no answer in 180 s", "a page") from error
    if done.returncode != 0:
        raise InvalidInput(browser, "browser", f"exit code {done.returncode}", "exit code 0")
    return done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
