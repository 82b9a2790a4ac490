"""The built site, as a reader has it: a folder of files, in a browser, without a network.

`make docs` builds it and reads its HTML. `make docs-test`, which the night runs, opens it
in a browser as well: the system's Chromium. Without one these tests are skipped.
"""

import os
import re
import shutil
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parents[2] / "site"
# Not 404.html: a server shows it, and its links are from the root.
PAGES = sorted(p for p in SITE.rglob("*.html") if p.name != "404.html")
NAMES = [p.relative_to(SITE).as_posix() for p in PAGES]
INSTALLED = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, INSTALLED), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
# As narrow as a phone.
NARROW = {"width": 390, "height": 844}


def test_the_site_is_built() -> None:
    assert len(PAGES) > 30, "run make docs"


# Read as HTML


class Parsed(HTMLParser):
    """The ids of a page, where its links go, and what a browser fetches for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        self.ids |= {given[k] for k in ("id", "name") if k in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.fetched += [given[k] for k in ("src", "srcset", "poster") if k in given]
        if tag == "link":
            self.fetched.append(given.get("href", ""))


@pytest.fixture(scope="module")
def parsed() -> dict[Path, Parsed]:
    return {path: Parsed(path) for path in PAGES}


def test_links_and_anchors_are_there(parsed: dict[Path, Parsed]) -> None:
    dead = []
    for path, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("http", "https", "mailto"), link
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not there.is_file():
                dead.append(f"{path.relative_to(SITE)}: {link}")
            elif anchor and there in parsed and anchor not in parsed[there].ids:
                dead.append(f"{path.relative_to(SITE)}: {link}: no such anchor")
    assert not dead, "\n".join(dead)


def test_the_page_of_changes_shows_the_file_of_changes() -> None:
    assert "<h2" in (SITE / "changes.html").read_text()


def test_nothing_is_fetched_from_elsewhere(parsed: dict[Path, Parsed]) -> None:
    for path, page in parsed.items():
        for url in page.fetched:
            parts = urlsplit(url)
            assert parts.scheme in ("", "data") and not parts.netloc, f"{path}: {url}"
    for path in SITE.rglob("*.css"):
        found = re.findall(r"url\(\s*[\"']?(?:https?:)?//[^)]*", path.read_text())
        assert not found, f"{path}: {found}"


# What notebooks print, and the table of `describe`, may be wider.
PRINTED = re.compile(r'<div class="jp-RenderedText[^>]*>\s*<pre>.*?</pre>', re.S)
CODE = re.compile(r"<pre[^>]*>(.*?)</pre>", re.S)
COLUMNS = 76


def test_code_fits_its_column() -> None:
    wide = []
    for path in PAGES:
        for source in CODE.findall(PRINTED.sub("", path.read_text())):
            lines = unescape(re.sub(r"<[^>]+>", "", source)).splitlines()
            if not any(line.startswith("group  tensors") for line in lines):
                wide += [f"{path.name}: {line}" for line in lines if len(line) > COLUMNS]
    assert not wide, "\n".join(wide)


def test_reference_pages_show_signatures_and_no_inner_names(
    parsed: dict[Path, Parsed],
) -> None:
    pages = [path for path in PAGES if path.parent.name == "reference"]
    assert len(pages) > 10
    for path in pages:
        text = unescape(re.sub(r"<[^>]+>", "", path.read_text()))
        assert "Bases:" not in text and "defaults: Group" not in text, path
        inner = [x for x in parsed[path].ids if re.search(r"optimi_func\..*\b_[a-z]", x)]
        assert not inner, f"{path}: {inner}"
    text = (SITE / "reference/optimizers.html").read_text()
    plain = " ".join(unescape(re.sub(r"<[^>]+>", "", text)).split())
    assert "AdamW( params, lr=0.001, betas=(0.9, 0.99), weight_decay=0.01," in plain


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def tab(browser) -> Iterator:
    """One for all pages: what it logs and asks for is taken by each test."""
    context = browser.new_context(viewport=NARROW, color_scheme="light")
    context.set_default_timeout(10_000)
    page = context.new_page()
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "console",
        lambda said: said.type == "error" and page.complaints.append(said.text),
    )
    page.on(
        "request",
        lambda asked: (
            asked.url.startswith(("file:", "data:", "blob:"))
            or page.complaints.append(f"asks for {asked.url}")
        ),
    )
    page.on(
        "requestfailed",
        lambda failed: page.complaints.append(f"{failed.url}: {failed.failure}"),
    )
    yield page
    context.close()


SEEN = """() => ({
  broken: [...document.images].filter(i => !(i.complete && i.naturalWidth))
    .map(i => i.src),
  sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  wide: [...document.querySelectorAll('.md-content *')].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1 &&
    !e.closest('.md-typeset__scrollwrap, pre, .arithmatex, .jp-OutputArea')
    ).slice(0, 3).map(e => e.outerHTML.slice(0, 120)),
  unmade: [...document.querySelectorAll('.arithmatex')].filter(
    e => !e.querySelector('.katex')).map(e => e.textContent),
  failed: [...document.querySelectorAll('.katex-error')].map(e => e.textContent),
  dollars: /[$][$]/.test(document.querySelector('.md-content').innerText),
})"""

# Of every element with words of its own: the contrast of WCAG between them and what is
# behind them, where all of that is plain color.
CONTRAST = """() => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext('2d', {willReadFrequently: true});
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1); pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = (top, under) => top.slice(0, 3).map(
    (x, i) => x * top[3] + under[i] * (1 - top[3]));
  const behind = e => {
    if (!e) return rgba(getComputedStyle(document.body).backgroundColor).slice(0, 3);
    const own = rgba(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(e.parentElement));
  };
  const light = rgb => rgb.map(x => x / 255).map(
    x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
  ).reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const poor = {};
  for (const e of document.querySelectorAll('.md-content *')) {
    if (e.closest('.katex, svg, .headerlink, button, .md-code__nav')) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility()) continue;
    const under = behind(e);
    const ground = light(under);
    const words = light(over(rgba(getComputedStyle(e).color), under));
    const ratio = (Math.max(words, ground) + 0.05) / (Math.min(words, ground) + 0.05);
    if (ratio < 4.5) {
      const name = e.tagName + '.' + e.className;
      poor[name] ??= ratio.toFixed(2) + ' ' + e.textContent.trim().slice(0, 40);
    }
  }
  return poor;
}"""


@pytest.mark.night
@pytest.mark.parametrize("name", NAMES)
def test_page(tab, name: str) -> None:
    tab.complaints.clear()
    tab.goto((SITE / name).as_uri())
    seen = tab.evaluate(SEEN)
    assert tab.complaints == []
    assert seen["broken"] == []
    assert seen["sideways"] <= 0, seen["wide"]
    assert seen["unmade"] == seen["failed"] == [] and not seen["dollars"]
    tab.add_style_tag(content="* {transition: none !important}")
    for scheme in ("default", "slate"):
        tab.evaluate(f"document.body.dataset.mdColorScheme = '{scheme}'")
        assert tab.evaluate(CONTRAST) == {}, scheme


@pytest.fixture
def desk(browser) -> Iterator:
    """A wide window of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    yield context.new_page()
    context.close()


@pytest.mark.night
def test_tables_fit_the_page(desk) -> None:
    shown = "[...document.querySelectorAll('.md-typeset__table > table')]"
    wide = []
    for path in sorted(SITE.glob("*.html")):
        desk.goto(path.as_uri())
        widths = desk.evaluate(f"{shown}.map(x => x.getBoundingClientRect().width)")
        wide += [f"{path.name}: {x}" for x in widths if x > 690]
    assert not wide, "\n".join(wide)


@pytest.mark.night
def test_search_works_from_a_folder(desk) -> None:
    desk.goto((SITE / "index.html").as_uri())
    desk.wait_for_load_state()
    desk.keyboard.press("/")
    desk.keyboard.type("kahan")
    found = desk.locator(".md-search-result__item a")
    found.first.wait_for()
    assert found.count() > 1
    assert "kahan" in desk.locator(".md-search-result__list").inner_text().lower()
    there = urlsplit(found.first.get_attribute("href")).path
    found.first.click()
    desk.wait_for_url(f"**{there}*")
    assert "kahan" in desk.locator(".md-content").inner_text().lower()


@pytest.mark.night
def test_colors_can_be_chosen(desk) -> None:
    desk.emulate_media(color_scheme="light")
    desk.goto((SITE / "index.html").as_uri())
    shown = "document.body.dataset.mdColorScheme"
    assert desk.evaluate(shown) == "default"
    desk.get_by_title("Dark colors").click()
    assert desk.evaluate(shown) == "slate"
    desk.goto((SITE / "start.html").as_uri())
    assert desk.evaluate(shown) == "slate"  # it is remembered


@pytest.mark.night
def test_code_can_be_copied(desk) -> None:
    desk.goto((SITE / "optimizers/lion.html").as_uri())
    assert desk.get_by_title("Copy to clipboard").count() >= 2
