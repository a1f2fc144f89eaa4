"""The page of a plan in a real browser: it shows the forecasts' numbers, asks nobody for anything, and can be read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from framework.output import GIB, show_seconds
from framework.plan.check import check_layout
from framework.plan.forecast_plan import PlanForecast, forecast_plan
from framework.plan.page_html import MOST_BYTES, Page, render_html
from framework.plan.pages import make_page
from framework.recipe.compose import compose
from tests.browser.chromium import Chromium, Tab
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

PIPELINE = [
    *("model=llama3_2_1b", "parallel.pp=2", "parallel.tp=2", "launch.ranks=8", "launch.device=cuda", "cluster=h100_ib"),
    *("batch.context=8192", "batch.sequences_per_step=64", "batch.sequences_per_microbatch=16"),
]


@pytest.fixture(scope="module")
def found() -> PlanForecast:
    """A pipeline whose first ranks need more than a device has."""
    return forecast_plan(check_layout(compose(PIPELINE).require()))


@pytest.fixture(scope="module")
def page(found: PlanForecast) -> Page:
    return make_page(found)


@pytest.fixture(scope="module")
def file(page: Page, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(render_html(page), encoding="utf-8")
    return path


@pytest.fixture
def tab(browser: Chromium, file: Path):
    shown = Tab(browser, file)
    yield shown
    shown.close()


def read_marks(tab: Tab, chart: str, *fields: str) -> list[dict[str, str]]:
    """What a chart's marks say of themselves to a screen reader: of those that have all of these fields."""
    labels = tab.ask(f"[...document.querySelectorAll('#{chart} [aria-label]')].map((each) => each.ariaLabel)")
    marks = [dict(part.split(": ", 1) for part in label.split("; ") if ": " in part) for label in labels]
    return [mark for mark in marks if mark.keys() >= set(fields)]


def test_memory_is_the_forecasts(tab: Tab, found: PlanForecast) -> None:
    memory = found.forecast.memory
    drawn = {(mark["place"], mark["kind"]): float(mark["GiB"]) for mark in read_marks(tab, "memory", "GiB", "kind")}
    expected = {
        (place, kind): size / GIB
        for place, stage in zip(("ranks 0 to 3", "ranks 4 to 7"), memory.stages, strict=True)
        for kind, size in stage.held.items()
        if size
    }
    assert {key: value for key, value in drawn.items() if key in expected} == pytest.approx(expected, rel=1e-6)
    for place, stage in zip(("ranks 0 to 3", "ranks 4 to 7"), memory.stages, strict=True):
        whole = sum(value for (where, _), value in drawn.items() if where == place)
        assert whole == pytest.approx(stage.reserved / GIB)


def test_what_is_over_is_red_and_says_by_how_much(tab: Tab, found: PlanForecast) -> None:
    memory = found.forecast.memory
    assert memory.spare < 0, "the case is to be one that does not fit"
    over = f"{-memory.spare / GIB:,.1f} GiB over"
    assert over in tab.ask("document.getElementById('memory').textContent")
    red = "[...document.querySelectorAll('#memory path[fill=\"#d62839\"]')].map((each) => each.getBBox().width)"
    assert max(tab.ask(red)) > 5
    words = "[...document.querySelectorAll('#memory text')].find((each) => each.textContent.includes('over'))"
    assert tab.ask(f"getComputedStyle({words}).fill") == "rgb(179, 22, 42)"
    assert tab.ask("getComputedStyle(document.getElementById('verdict')).color") == "rgb(179, 22, 42)"


def test_a_menu_chooses_whose_step_is_shown(tab: Tab, found: PlanForecast) -> None:
    for place, stage in zip(("ranks 0 to 3", "ranks 4 to 7"), found.forecast.memory.stages, strict=True):
        tab.ask(
            "(() => { const menu = document.querySelector('#phases select'); menu.value = "
            f"'{place}'; menu.dispatchEvent(new Event('change')); }})()"
        )
        tab.wait_until(f"document.querySelector('#phases [aria-label*=\"place: {place}\"]') !== null")
        drawn = {(mark["phase"], mark["kind"]): float(mark["GiB"]) for mark in read_marks(tab, "phases", "GiB", "kind")}
        expected = {
            (phase, kind): size / GIB for phase, held in stage.phases.items() for kind, size in held.items() if size
        }
        assert {key: value for key, value in drawn.items() if key in expected} == pytest.approx(expected, rel=1e-6)


def test_time_is_the_forecasts(tab: Tab, found: PlanForecast) -> None:
    time = found.forecast.time
    parts = {mark["part"]: float(mark["seconds"]) for mark in read_marks(tab, "parts", "part")}
    assert parts == pytest.approx({part: seconds for part, seconds in time.parts.items() if seconds}, rel=1e-6)
    assert sum(parts.values()) == pytest.approx(time.step_s)
    tiles = "[...document.querySelectorAll('[data-fact]')].map((each) => [each.dataset.fact, each.textContent])"
    facts = tab.ask(f"Object.fromEntries({tiles})")
    assert facts["step time"] == show_seconds(time.step_s)
    assert facts["tokens/s"] == f"{time.tokens_per_s:,.0f}"
    assert facts["MFU"] == f"{time.mfu:.1%}"
    links = [mark for mark in read_marks(tab, "links", "how") if mark["axis"].startswith("tp")]
    assert {mark["how"]: float(mark["seconds of a step"]) for mark in links} == pytest.approx(
        {"hidden": time.hidden.get("tp", 0.0), "exposed": time.parts["tp"]}, rel=1e-6
    )


def test_the_timeline_has_all_actions_and_the_mesh_all_ranks(tab: Tab, found: PlanForecast) -> None:
    plan = found.plan
    schedule = plan.pipeline.make(plan.derived.accumulation)
    marks = read_marks(tab, "timeline", "microbatch")
    drawn = {(mark["rank"], mark["kind"], mark["stage"], mark["microbatch"]) for mark in marks}
    assert len(drawn) == sum(map(len, schedule.actions))
    ranks = {int(mark["rank"]): mark for mark in read_marks(tab, "mesh", "node", "pp")}
    assert sorted(ranks) == list(range(8))
    for rank, mark in ranks.items():
        assert [int(mark[axis]) for axis in ("pp", "dp", "tp")] == [
            plan.topology.index(axis, rank) for axis in ("pp", "dp", "tp")
        ]


@pytest.mark.parametrize(
    ("scheme", "width"),
    few_of(
        [("light", 1200), ("dark", 1200), ("light", 360), ("dark", 360)],
        lambda *row: row in {("light", 1200), ("dark", 360)},
    ),
)
def test_it_can_be_read(browser: Chromium, file: Path, scheme: str, width: int) -> None:
    """In the system's colours and on a narrow screen; it asks nobody for anything and complains of nothing."""
    tab = Tab(browser, file, scheme, width)
    assert tab.requests() == [file.as_uri()]
    assert tab.complaints() == []
    assert tab.ask("document.documentElement.scrollWidth") <= width
    rights = "[...document.querySelectorAll('.chart svg')].map((each) => each.getBoundingClientRect().right)"
    assert max(tab.ask(rights)) <= width
    assert tab.ask("document.querySelectorAll('.chart svg').length") == 6
    assert (brightness(tab, "document.body", "backgroundColor") < 0.2) == (scheme == "dark")
    assert contrast(tab, "document.body") > 7
    assert contrast(tab, "document.getElementById('verdict')") > 4.5
    axis = tab.ask("getComputedStyle(document.querySelector('#memory .role-axis-label text')).fill")
    assert (sum(map(int, re.findall(r"\d+", axis)[:3])) > 380) == (scheme == "dark")
    tab.close()


def test_the_button_turns_it_dark_and_back(tab: Tab) -> None:
    for theme in ("dark", "light"):
        tab.ask("document.getElementById('theme').click()")
        tab.wait_until(
            f"document.documentElement.dataset.ready && document.documentElement.dataset.theme === '{theme}'"
        )
        assert (brightness(tab, "document.body", "backgroundColor") < 0.2) == (theme == "dark")
    assert tab.complaints() == []


def test_names_are_text(browser: Chromium, page: Page, tmp_path: Path) -> None:
    """Whatever a recipe or a path is called: it ends no script and starts no tag."""
    name = "</script><script>document.title='taken'</script><b>&amp;"
    rows = dict(page.rows) | {"parts": [{"part": name, "seconds": 1.0, "words": name}]}
    file = tmp_path / "odd #name?.html"
    file.write_text(render_html(replace(page, title=name, verdict=name, changes=(name,), rows=rows)), encoding="utf-8")
    tab = Tab(browser, file)
    assert tab.ask("document.title") == name
    assert tab.ask("document.querySelector('h1').textContent") == name
    assert name in [mark["part"] for mark in read_marks(tab, "parts", "part")]
    assert tab.ask("document.querySelectorAll('b').length") == 0
    tab.close()


def test_a_request_and_an_error_are_seen(browser: Chromium, file: Path, tmp_path: Path) -> None:
    """What the other tests look for would be found; and the page's policy refuses what is not in it."""
    text = file.read_text(encoding="utf-8")
    bad = "<script>fetch('http://127.0.0.1:9/x').catch(() => 0); console.error('bad'); undefined.x</script>"
    before, end, after = text.rpartition("</body>")
    (tmp_path / "refused.html").write_text(f"{before}{bad}{end}{after}", encoding="utf-8")
    tab = Tab(browser, tmp_path / "refused.html")
    assert any("bad" in each for each in tab.complaints())
    assert any("TypeError" in each for each in tab.complaints())
    assert any("Content Security Policy" in each for each in tab.complaints())
    tab.close()
    policy = re.search(r"<meta http-equiv=.*?>", text)
    assert policy is not None
    (tmp_path / "asks.html").write_text(f"{before.replace(policy[0], '')}{bad}{end}{after}", encoding="utf-8")
    tab = Tab(browser, tmp_path / "asks.html")
    tab.wait_until("true")
    assert "http://127.0.0.1:9/x" in tab.requests()
    tab.close()


def test_it_is_small(file: Path) -> None:
    assert file.stat().st_size < MOST_BYTES


def brightness(tab: Tab, element: str, what: str) -> float:
    """Relative luminance of an element's colour, 0 to 1 (WCAG 2)."""
    numbers = re.findall(r"[\d.]+", tab.ask(f"getComputedStyle({element}).{what}"))
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (int(each) / 255 for each in numbers[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(tab: Tab, element: str) -> float:
    """Of an element's text to the page (WCAG 2): 4.5 is the least for text."""
    light, dark = sorted(
        (brightness(tab, element, "color"), brightness(tab, "document.body", "backgroundColor")), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)
