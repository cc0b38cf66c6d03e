"""A page in headless Chromium (Debian's `chromium`: apt-get install -y --no-install-recommends chromium), driven by a script within it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install -y --no-install-recommends chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1240,2000", "--hide-scrollbars", "--virtual-time-budget=30000",
)  # fmt: skip
PLOTS = """
  told.plots = [...document.querySelectorAll('div[id^="plot"],#explored')].map((p) => p.querySelectorAll(".main-svg").length > 0);
  told.lines = [...document.querySelectorAll('div[id^="plot"]')].map((p) => p.querySelectorAll(".trace, .point, .hm, path").length);
  told.drawn = document.body.dataset.drawn;
"""
"""Notes whether each plot is drawn, how many marks are in it, and how many promises of a plot were kept."""


def chromium(url: str, profile: Path, *more: str) -> tuple[str, list[str]]:
    """(what it printed, the lines of the page's console)."""
    command = [str(CHROMIUM), *FLAGS, "--enable-logging=stderr", f"--user-data-dir={profile}", *more, url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return ran.stdout, [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]


def browse(page: str, script: str, folder: Path) -> dict[str, Any]:
    """What `script` put into `told`, 3 s after the page was loaded. Fails when the page's console had anything to say."""
    whole = (
        '<script>addEventListener("load", () => setTimeout(() => { const told = {};'
        f"{script}"
        'document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(told) }));'
        "}, 3000));</script></body>"
    )
    file = folder / "page.html"
    file.write_text(page.replace("</body>", whole))
    printed, console = chromium(file.as_uri(), folder / "profile", "--dump-dom")
    assert console == [], console
    found = re.search(r"<pre>(.*?)</pre>", printed, re.S)
    assert found, printed[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told
