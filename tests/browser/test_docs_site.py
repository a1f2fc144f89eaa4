"""The site in a real browser, opened from the disk: pages, figures, search. No error is said and no network is asked."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, Tab
from tests.grid import IN_TURN, few_of
from tests.unit.test_docs_site import build

pytestmark = IN_TURN

REPOSITORY = Path(__file__).parents[2]
FIGURES = sorted(path.stem for path in (REPOSITORY / "docs" / "figures").glob("*.png"))

# Moves each control of a figure to its last value and focuses the marks; returns the controls that changed nothing, and words
# that are cut or lie over others.
MOVE = """
(() => {
  const figure = document.querySelector('figure[data-figure=NAME]');
  const picture = figure.querySelector('.picture');
  const idle = [];
  const meets = (a, b) => Math.min(a.right, b.right) > Math.max(a.left, b.left) + 1
    && Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + 4;
  const read = () => {
    const [frame, ...boxes] = [...picture.querySelectorAll('svg, svg text')].map((each) => each.getBoundingClientRect());
    const words = [...picture.querySelectorAll('svg text')].map((each) => each.textContent);
    boxes.forEach((box, at) => {
      const isCut = box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
      if (isCut) idle.push(words[at] + ' is cut');
      const over = boxes.findIndex((other, place) => place > at && meets(box, other));
      if (over > 0) idle.push(words[at] + ' lies over ' + words[over]);
    });
  };
  read();
  for (const input of figure.querySelectorAll('input')) {
    const before = picture.innerHTML;
    const isSlider = input.type === 'range';
    if (isSlider ? input.value === input.max : input.checked) continue;
    if (isSlider) input.value = input.max;
    else input.checked = true;
    input.dispatchEvent(new Event(isSlider ? 'input' : 'change', { bubbles: true }));
    if (picture.innerHTML === before) idle.push(input.ariaLabel ?? input.value);
    read();
    for (const mark of [...picture.querySelectorAll('[tabindex]')].slice(0, 40)) mark.focus();
    if (!figure.querySelector('.words').textContent) throw new Error('no words');
    if (/NaN|undefined|Infinity/.test(figure.innerHTML)) throw new Error('not a number with ' + input.value);
  }
  return idle;
})()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if not find_spec("material"):
        pytest.skip("mkdocs-material is not installed: pip install 'meshwright[docs]'")
    folder = tmp_path_factory.mktemp("site")
    assert build("--site-dir", str(folder)).returncode == 0
    return folder


def find_page(site: Path, figure: str) -> Path:
    picture = f"figures/{figure}.png"
    return next(path for path in sorted(site.glob("*.html")) if picture in path.read_text(encoding="utf-8"))


def assert_quiet(tab: Tab) -> None:
    assert not tab.complaints()
    assert not [url for url in tab.requests() if not url.startswith("file:")]


@pytest.mark.parametrize(
    "names", few_of([(["index.html", "zero.html"],), (["*.html"],)], lambda names: len(names) == 2)
)
def test_pages_open_without_a_word_to_anybody(browser: Chromium, site: Path, names: list[str]) -> None:
    # 404.html is of servers: its addresses begin at the root.
    pages = [page for name in names for page in sorted(site.rglob(name)) if page.name != "404.html"]
    assert len(pages) >= len(names)
    for page in pages:
        tab = Tab(browser, page)
        assert tab.ask("document.querySelector('h1') !== null"), page
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth"), f"{page} is wider than the screen"
        assert_quiet(tab)
        tab.close()


@pytest.mark.parametrize("name", few_of(FIGURES, lambda name: name in ("mesh", "ring", "zero")))
def test_every_control_of_a_figure_moves_it(browser: Chromium, site: Path, name: str) -> None:
    tab = Tab(browser, find_page(site, name), "dark" if FIGURES.index(name) % 2 else "light")
    assert tab.ask(f"document.querySelectorAll('figure[data-figure={name}] svg *').length") > 10
    assert tab.ask(MOVE.replace("NAME", name)) == []
    picture = f"document.querySelector('figure[data-figure={name}] svg')"
    tab.emulate("light", 420)
    tab.wait_until(f"{picture}.getBoundingClientRect().right <= innerWidth")
    assert tab.ask(MOVE.replace("NAME", name)) == []
    assert_quiet(tab)
    tab.close()


def test_colours_follow_the_system(browser: Chromium, site: Path) -> None:
    tab = Tab(browser, find_page(site, "zero"))
    ink = "getComputedStyle(document.querySelector('figure.live svg text')).fill"
    light = tab.ask(ink)
    tab.emulate("dark", 1200)
    tab.wait_until(f"{ink} !== {light!r}")
    tab.close()


def test_bars_are_as_long_as_the_numbers(browser: Chromium, site: Path) -> None:
    tab = Tab(browser, find_page(site, "zero"))
    marks = "[...document.querySelectorAll('figure[data-figure=zero] [data-mib]')]"
    bars = tab.ask(f"{marks}.map((each) => [Number(each.dataset.mib), each.width.baseVal.value])")
    scales = [width / mib for mib, width in bars if mib > 1000]
    assert len(scales) > 10
    assert max(scales) == pytest.approx(min(scales), rel=1e-6)
    tab.close()


def test_arrows_walk_through_the_mesh(browser: Chromium, site: Path) -> None:
    tab = Tab(browser, find_page(site, "mesh"))
    tab.ask("document.querySelector('[data-rank=\"0\"]').focus()")
    event = "new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true })"
    tab.ask(f"document.activeElement.dispatchEvent({event})")
    words = tab.ask("document.querySelector('figure[data-figure=mesh] .words').textContent")
    assert words.startswith("Rank 4 is pp 0, dp 0, cp 1, tp 0")
    lit = "[...document.querySelectorAll('[data-lit=true], [data-lit=own]')]"
    ranks = tab.ask(f"{lit}.map((each) => Number(each.dataset.rank))")
    assert set(ranks) == {0, 4, 5, 6, 7, 12, 20}, "its groups along tp, cp, dp and pp"
    tab.close()


def test_a_search_needs_no_server(browser: Chromium, site: Path) -> None:
    tab = Tab(browser, site / "index.html")
    field = "document.querySelector('[data-md-component=search-query]')"
    tab.ask(f"{field}.focus(), {field}.value = 'zig-zag'")
    for event in ("input", "keyup"):
        tab.ask(f"{field}.dispatchEvent(new Event('{event}', {{ bubbles: true }}))")
    found = "[...document.querySelectorAll('.md-search-result__link')]"
    tab.wait_until(f"{found}.some((each) => each.href.includes('context'))")
    assert_quiet(tab)
    tab.close()
