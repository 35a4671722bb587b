"""The built documentation in a real browser: what a reader looks for is there, found by the search, and not cut off."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import pytest

import pgfence
from pgfence import errors
from support import browser, docsite
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.browser import Browser

pytest.importorskip("furo", reason="the dependency group 'docs' is not installed")
# The first test waits for the build, which the other workers may slow down.
pytestmark = pytest.mark.timeout(300)

ERRORS = sorted(
    name for name, error in inspect.getmembers(errors, inspect.isclass) if issubclass(error, errors.PgfenceError)
)
"""The names of all error classes."""


class Site(NamedTuple):
    """The documentation, built and served."""

    pages: Path
    url: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.getbasetemp()
    # Under xdist each worker has a folder of its own in one that they share.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    folder.mkdir(exist_ok=True)
    pages = docsite.build(folder)
    with docsite.serve(pages) as url:
        yield Site(pages, url)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if missing := browser.missing_programs():
        pytest.skip(f"not installed: {missing}")
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


# The site does not scroll sideways: what is too wide, and in nothing that scrolls, is cut off.
CUT_OFF = """
    const scrolls = one => one && one.tagName !== "ARTICLE" && (
        ["auto", "scroll"].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
    return [...document.querySelectorAll("article *")]
        .filter(one => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one))
        .map(one => one.outerHTML.slice(0, 80));
"""
# The longest line of each block of code or row of a table that is wider than its box.
WIDE = """
    return [...document.querySelectorAll("article pre, article .table-wrapper")]
        .filter(block => block.scrollWidth > block.clientWidth)
        .map(block => block.innerText.split("\\n").reduce((one, other) => one.length > other.length ? one : other));
"""


def text(window: Browser, selector: str) -> list[str]:
    """Return the texts of the elements that match."""
    found: list[str] = window.run(
        "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText.trim())", selector
    )
    return found


def test_no_link_inside_the_site_leads_nowhere(site: Site) -> None:
    """Each link to a page, a file or an anchor of the site has its target."""
    assert docsite.dead_links(site.pages) == []


def test_front_page_says_how_to_install_and_where_to_start(site: Site, window: Browser) -> None:
    """The front page has the install command, an example to copy, the version, and links to the changelog and the start."""
    window.show(1280)
    window.open(site.url)
    assert text(window, "h1") == ["pgfence"]
    assert "pip install" in text(window, "article pre")[0]
    assert len(text(window, "article button.copybtn")) == len(text(window, "article pre"))
    assert f"pgfence {pgfence.__version__.partition('+')[0]}" in text(window, ".announcement")[0]
    links = window.run("return [...document.querySelectorAll('a')].map(one => one.href)")
    assert {f"{site.url}changelog.html", f"{site.url}learn/getting-started.html"} <= set(links)
    window.open(f"{site.url}changelog.html")
    assert text(window, "h1") == ["Changelog"]


@every_row(
    "words, page",
    [
        ("pgbouncer", "operate/poolers.html"),
        ("faq", "operate/faq.html"),
        ("timeout", "reference/configuration.html"),
        ("pip install", "learn/getting-started.html"),
        *((name, "reference/errors.html") for name in ERRORS),
        *((name, "operate/troubleshooting.html") for name in ERRORS),
    ],
)
def test_search_finds_what_readers_look_for(site: Site, window: Browser, words: str, page: str) -> None:
    """The search finds the page of a topic, a command, and each error class."""
    window.open(f"{site.url}search.html?q={quote(words)}")
    window.wait(
        "/^(Search finished|Your search did not match)/.test(document.querySelector('.search-summary')?.innerText)"
    )
    found = window.run("return [...document.querySelectorAll('ul.search a')].map(one => one.href.split('#')[0])")
    assert any(link.removeprefix(site.url).split("?")[0] == page for link in found), found


def test_how_to_page_has_its_examples_and_neighbours(site: Site, window: Browser) -> None:
    """A how-to shows code that can be copied, and links to its section and to the next page."""
    window.show(1280)
    window.open(f"{site.url}how-to/long-job.html")
    assert len(text(window, "h1")) == 1
    assert text(window, "article pre")
    assert text(window, "article button.copybtn")
    assert text(window, ".sidebar-tree .current-page > a")
    assert text(window, "footer .next-page .title")


def test_reference_page_lists_its_members_and_their_words(site: Site, window: Browser) -> None:
    """A page of the reference has a table of members that link to their places, and properties keep their first words."""
    window.show(1280)
    window.open(f"{site.url}reference/handles.html")
    assert "Held" in text(window, "article table.autosummary a")
    assert "held" in text(window, "[id='pgfence.Held.state'] + dd > p")[0]


def test_no_property_loses_its_first_words_to_a_type(site: Site, window: Browser) -> None:
    """The type of a property is in its signature, so a field "Type" under one holds words of its docstring."""
    garbled = []
    for page in docsite.page_names(site.pages):
        if page.startswith("reference/"):
            window.open(site.url + page)
            fields = text(window, "dl.py.property dl.field-list dt")
            garbled += [page for field in fields if field.lower().startswith("type")]
    assert garbled == []


def test_page_not_found_is_a_page_of_the_site(site: Site, window: Browser) -> None:
    """An address without a page shows a page with the styles, the search and the links of the site, at any depth."""
    window.open(f"{site.url}no/such/page.html")
    assert text(window, "h1") == ["Page not found"]
    assert window.run("return [...document.styleSheets].every(one => one.cssRules.length > 0)")
    assert f"{site.url}index.html" in window.run("return [...document.querySelectorAll('a')].map(one => one.href)")


def test_nothing_is_wider_than_the_column_at_1280_pixels(site: Site, window: Browser) -> None:
    """At a width of 1280 px no table and no block of code has to be scrolled: 88 columns fit, also in a docstring."""
    window.show(1280)
    wide = []
    for page in docsite.page_names(site.pages):
        window.open(site.url + page)
        wide += [f"{page}: {line}" for line in window.run(WIDE)]
    assert wide == []


def test_nothing_is_cut_off_on_a_phone(site: Site, window: Browser) -> None:
    """At a width of 390 px all of each page can be seen; wide tables and code scroll by themselves."""
    window.show(390)
    cut_off = []
    for page in docsite.page_names(site.pages):
        window.open(site.url + page)
        cut_off += [f"{page}: {element}" for element in window.run(CUT_OFF)]
    assert cut_off == []
