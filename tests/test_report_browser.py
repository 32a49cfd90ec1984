"""The page of a campaign in a real browser: it is all there, offline, wide, narrow and printed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvproof.fuzz.campaigns.records import Campaign, Target
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.fuzz.campaigns.store import Store
from kvproof.fuzz.report.summary import Summary, summarise

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
MISSING = [name for name in ("jinja2", "selenium") if find_spec(name) is None]
if CHROMIUM is None or DRIVER is None:
    MISSING.append("chromium with its chromedriver (see .ci/browser)")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NARROW = 400
"""Pixels of a small telephone."""


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Of a campaign with a fault planted."""
    folder = tmp_path_factory.mktemp("campaign") / "campaign"
    target = Target("cache", "engine", tiers_share=0.0)
    Store(folder).begin(Campaign("7", (target,), 1, "no-copy-on-write"))
    run_job(ShardJob(str(folder), 0, 2.5))
    return summarise([folder])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window, that reaches no network and keeps what its console says."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, summary: Summary, tmp_path: Path) -> Any:
    """The page, as one opens a file."""
    from kvproof.fuzz.report.page import write_page

    file = tmp_path / "report.html"
    write_page(summary, file)
    emulate(browser, width=1200)
    browser.get(file.as_uri())
    return browser


def emulate(browser: Any, *, width: int, media: str = "screen", scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width <= NARROW}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def shown(browser: Any, css: str) -> list[Any]:
    """What matches and is rendered; what is folded away is not."""
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
    found: list[Any] = browser.execute_script(script, css)
    return found


def colours(browser: Any, css: str, name: str) -> set[str]:
    """All that such elements have."""
    script = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".map(e => getComputedStyle(e).getPropertyValue(arguments[1]))"
    )
    return set(browser.execute_script(script, css, name))


def test_a_browser_shows_it_without_a_complaint(opened: Any, summary: Summary) -> None:
    assert opened.title == "FAIL: kvproof campaign"
    assert opened.get_log("browser") == []
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    (finding,) = summary.findings
    (article,) = shown(opened, "article.finding")
    assert finding.record.message in article.text
    assert summary.sentence in opened.find_element("css selector", "h1").text


def test_the_console_is_really_listened_to(browser: Any, tmp_path: Path) -> None:
    """Positive control: what a page must not do is seen."""
    file = tmp_path / "bad.html"
    file.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('planted')</script>")
    browser.get(file.as_uri())
    assert any("planted" in entry["message"] for entry in browser.get_log("browser"))
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 1


def test_the_block_map_is_seen_with_its_violation(opened: Any) -> None:
    (picture,) = shown(opened, ".map svg.blocks")
    assert picture.size["width"] > 200
    (mark,) = shown(opened, ".map rect.violation")
    assert mark.value_of_css_property("stroke") == "rgb(209, 0, 31)"
    assert len(colours(opened, ".map .bar", "fill")) >= 2
    assert [label.text for label in shown(opened, ".map text.holder")].count("r0 r1") >= 1


@pytest.mark.parametrize("width", [1200, NARROW])
def test_the_line_of_the_violation_is_seen_whole(opened: Any, width: int) -> None:
    emulate(opened, width=width)
    (mark,) = shown(opened, ".log mark")
    longer = mark.text.replace("✗", "and so on " * 30 + "✗")
    opened.execute_script("arguments[0].textContent = arguments[1]", mark, longer)
    scroll = mark.find_element("xpath", "ancestor::div")
    ends = [own.rect["x"] + own.rect["width"] for own in (mark, scroll)]
    assert ends[0] <= ends[1]
    assert mark.rect["height"] > 30  # more than one line of text
    opened.execute_script("arguments[0].style.maxWidth = 'none'", mark)
    assert mark.rect["width"] > scroll.rect["width"]  # the measure can fail


def test_charts_and_heat_map_are_seen(opened: Any) -> None:
    assert len(shown(opened, "svg.chart")) == 3
    assert len(shown(opened, "svg.chart polyline.series")) >= 2  # one point is no line
    assert len(shown(opened, "table.heat td[title]")) > 20
    assert len(colours(opened, "table.heat td[title]", "background-color")) >= 3


def test_nothing_sticks_out_of_a_narrow_screen(opened: Any) -> None:
    emulate(opened, width=NARROW)
    for detail in opened.find_elements("css selector", "details"):
        opened.execute_script("arguments[0].open = true", detail)
    page_width = "return document.documentElement.scrollWidth"
    assert opened.execute_script(page_width) <= NARROW
    opened.execute_script("document.querySelector('main').style.width = '500px'")
    assert opened.execute_script(page_width) > NARROW  # the measure can fail


def test_a_wide_map_begins_at_its_violation(opened: Any) -> None:
    emulate(opened, width=260)
    (scroll,) = shown(opened, ".map")
    (mark,) = shown(opened, ".map rect.violation")
    assert opened.execute_script("return arguments[0].scrollWidth", scroll) > scroll.size["width"]
    right = scroll.rect["x"] + scroll.size["width"]
    assert scroll.rect["x"] < mark.rect["x"] < mark.rect["x"] + mark.size["width"] <= right


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_by_day_and_night(opened: Any, scheme: str) -> None:
    """WCAG asks for a contrast of 4.5 between a text and what is behind it."""
    emulate(opened, width=1200, scheme=scheme)
    page = luminance(opened.find_element("css selector", "body"), "background-color")
    assert (page < 0.1) == (scheme == "dark")
    for css in (".message", ".facts", ".story li", ".log mark", "h4", ".code", ".legend li", "td"):
        element = shown(opened, css)[0]
        behind = element if css == ".log mark" else opened.find_element("css selector", "body")
        pair = luminance(element, "color"), luminance(behind, "background-color")
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5, css


def luminance(element: Any, css: str) -> float:
    """Relative luminance, as WCAG defines it."""
    text = element.value_of_css_property(css)
    parts = [int(part) / 255 for part in text.partition("(")[2].rstrip(")").split(",")[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_on_paper_everything_is_unfolded(opened: Any, summary: Summary) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    (finding,) = summary.findings
    source = (finding.folder / f"test_{finding.record.id}.py").read_text()

    def is_shown(browser: Any) -> bool:
        texts = [pre.get_property("textContent") for pre in shown(browser, "details pre")]
        return source.strip() in [text.strip() for text in texts]

    assert not is_shown(opened)
    emulate(opened, width=1200, media="print")
    assert WebDriverWait(opened, 10).until(is_shown)
