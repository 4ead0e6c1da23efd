"""The HTML reports in a real browser: no console message, no network, every plot to be seen, light and dark."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from kvtier.cli.main import run

FORBIDDEN = re.compile(r"<script|<link(?! rel=\"icon\" href=\"data:)|@import|url\(|\bsrc=|https?://", re.IGNORECASE)
NAMES = ("replay", "plan")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    trace = str(folder / "traffic <b>&.jsonl")
    assert run(["trace", "generate", "--kind", "mixed", "--requests", "600", "--rate", "4", "-o", trace]) == 0
    paths = {name: folder / f"{name}.html" for name in NAMES}
    assert run(["replay", trace, "--policy", "lru,arc,min", "--ram", "2%,10%,40%", "--html", str(paths["replay"])]) == 0
    assert run(["plan", trace, "--policy", "arc,lru", "--html", str(paths["plan"])]) == 0
    return paths


@pytest.mark.parametrize("name", NAMES)
def test_one_file_that_asks_for_nothing_else(reports, name):
    text = reports[name].read_text()
    assert not FORBIDDEN.search(text)
    assert "prefers-color-scheme: dark" in text
    assert "traffic &lt;b&gt;&amp;.jsonl" in text
    assert "<b>&" not in text
    assert text.count("<svg") == text.count("</svg>") >= 2
    assert "nan" not in re.sub(r"<[^>]*>", "", text).lower().split()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("KVTIER_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here (KVTIER_CHROMIUM names one)")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def visible_charts(page) -> list[dict]:
    """Size and shapes of every chart that is shown."""
    return page.evaluate(
        """() => [...document.querySelectorAll('svg')].filter(svg => svg.checkVisibility()).map(svg => {
            const box = svg.getBoundingClientRect();
            const shapes = [...svg.querySelectorAll('polyline, rect:not([width="0.0"])')]
                .map(shape => shape.getBoundingClientRect());
            const colours = [...svg.querySelectorAll('polyline')].map(line => getComputedStyle(line).stroke);
            return {width: box.width, height: box.height, label: svg.getAttribute('aria-label'), colours,
                    drawn: shapes.filter(shape => shape.width > 0 && shape.left >= box.left - 1 &&
                        shape.right <= box.right + 1 && shape.bottom <= box.bottom + 1).length,
                    all: shapes.length};
        })"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_browser(reports, browser, tmp_path, name, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1240, "height": 900}, offline=True)
    page = context.new_page()
    messages: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(reports[name].as_uri())
    charts = visible_charts(page)
    assert messages == []
    assert [url for url in asked if not url.startswith("data:")] == [reports[name].as_uri()]
    assert len(charts) == {"replay": 5, "plan": 2}[name]
    for chart in charts:
        assert chart["width"] > 300, chart
        assert chart["height"] > 60, chart
        assert chart["drawn"] == chart["all"] > 0, chart
        assert "none" not in chart["colours"], chart
        assert chart["label"]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(251, 251, 250)"
    assert dark is (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1240
    folder = Path(os.environ.get("KVTIER_ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{name}-{scheme}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 20_000
    if name == "replay":
        shown = charts[1]["label"]
        page.locator(".tabs > label").first.click()
        assert visible_charts(page)[1]["label"] != shown
    context.close()
