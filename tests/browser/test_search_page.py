"""The page of a search in a real browser: sliders move and change what is picked, and what is shown are the search's numbers."""

from pathlib import Path

import pytest

from framework.output import GIB, show_seconds
from framework.plan.find import Question, explore
from framework.plan.page_html import MOST_BYTES, render_html
from framework.plan.pages import CHOICES, choice_of, choose_rows, make_search_page
from framework.plan.search import Ranked, Search, describe
from framework.recipe.compose import compose
from tests.browser.chromium import Chromium, Tab
from tests.grid import IN_TURN

pytestmark = IN_TURN

# Few layouts, of which some do not fit: whole sequences of many tokens.
WORDS = [
    *("model=llama3_2_1b", "launch.ranks=4", "launch.device=cuda", "cluster=h100_ib", "batch.sequences_per_step=16"),
    "batch.sequences_per_microbatch=1",
    *("batch.context=32768", "pipeline.schedule=1f1b", "memory.activation_checkpointing=none"),
]
PINNED = frozenset(
    {
        *("pipeline.schedule", "pipeline.virtual_stages", "memory.activation_checkpointing", "parallel.cp"),
        *("memory.offload.activations", "memory.offload.optimizer", "memory.offload.parameters", "parallel.sequence"),
    }
)


@pytest.fixture(scope="module")
def explored() -> tuple[list[Search], list[Ranked]]:
    return explore(Question(compose(WORDS).require(), PINNED))


@pytest.fixture(scope="module")
def layouts(explored) -> tuple[list[Ranked], list[Ranked]]:
    """(those that fit, fastest first, those that do not)."""
    results, over = explored
    found = [each for result in results for each in (*result.ranked, *result.others)]
    return sorted(found, key=lambda each: each.forecast.time.step_s), over


@pytest.fixture(scope="module")
def file(explored, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "search.html"
    path.write_text(render_html(make_search_page(*explored)), encoding="utf-8")
    return path


@pytest.fixture
def tab(browser: Chromium, file: Path):
    shown = Tab(browser, file)
    yield shown
    assert shown.complaints() == []
    assert shown.requests() == [file.as_uri()]
    shown.close()


def move(tab: Tab, key: str, place: int) -> None:
    """Move a slider as a hand does: 0 is any, then the values in order."""
    slider = f"document.querySelector('input[data-key={key}]')"
    tab.ask(f"(() => {{ {slider}.value = {place}; {slider}.dispatchEvent(new Event('input')); }})()")


def sliders(tab: Tab) -> dict[str, int]:
    """The last place of each."""
    return dict(
        tab.ask("[...document.querySelectorAll('input[data-key]')].map((each) => [each.dataset.key, Number(each.max)])")
    )


def picked(tab: Tab) -> dict[str, str]:
    """What is said of the picked layout."""
    pairs = (
        "[...document.querySelectorAll('#picked [data-value]')].map((each) => [each.dataset.value, each.textContent])"
    )
    words = tab.ask("document.querySelector('[data-picked]').textContent")
    number, _, layout = words.partition(". ")
    return tab.ask(f"Object.fromEntries({pairs})") | {"number": number, "layout": layout}


def is_said_of(said: dict[str, str], layout: Ranked) -> bool:
    """Whether all that the page says of the picked layout is what was foretold of this one."""
    time, memory = layout.forecast.time, layout.forecast.memory
    room = f"{layout.missing / GIB:,.1f} GiB over" if layout.missing else f"{memory.spare / GIB:,.1f} GiB to spare"
    expected = {
        "layout": describe(layout.candidate),
        "step": show_seconds(time.step_s),
        "speed": f"{time.tokens_per_s_and_rank:,.0f}",
        "mfu": f"{time.mfu:.1%}",
        "verdict": room,
        "hours": f"{time.hours:,.1f}",
    }
    return all(said[key] == value for key, value in expected.items())


def test_the_fastest_is_picked_first(tab: Tab, layouts) -> None:
    """Of those on as many GPUs as were asked for."""
    assert is_said_of(picked(tab), next(each for each in layouts[0] if each.candidate.world == 4))


def test_sliders_pick_the_fastest_that_matches(tab: Tab, layouts) -> None:
    fitting, over = layouts
    move(tab, "gpus", 0)
    assert list(sliders(tab)) == ["gpus", "dp", "tp", "pp", "cp", "ep", "zero", "microbatch"]
    seen = set()
    values = sorted({each.candidate.tp for each in (*fitting, *over)})
    for place, tp in enumerate(values, start=1):
        move(tab, "tp", place)
        best = next(each for each in (*fitting, *over) if each.candidate.tp == tp)
        tab.wait_until(f"document.querySelector('[data-picked]').textContent.endsWith('{describe(best.candidate)}')")
        assert is_said_of(picked(tab), best)
        seen.add(picked(tab)["number"])
        output = tab.ask(
            "document.querySelector('input[data-key=tp]').parentElement.querySelector('output').textContent"
        )
        assert output == str(tp)
        cells = "[...document.querySelectorAll('#layouts tbody tr[data-number] td:nth-child(3)')]"
        rows = tab.ask(f"{cells}.map((each) => each.textContent)")
        assert rows
        assert all((f"tp={tp}" in row.split()) == (tp > 1) for row in rows)
    assert len(seen) == len(values) > 1
    move(tab, "tp", 0)
    tab.wait_until(f"document.querySelector('[data-picked]').textContent.endsWith('{describe(fitting[0].candidate)}')")


def test_two_sliders_that_nothing_matches_say_so(tab: Tab, layouts) -> None:
    move(tab, "gpus", 1)
    move(tab, "dp", sliders(tab)["dp"])
    tab.wait_until("document.getElementById('matching').textContent.startsWith('No layout with')")
    assert tab.ask("document.getElementById('details').hidden")


def test_a_row_of_what_does_not_fit_is_red(tab: Tab, layouts) -> None:
    over = layouts[1]
    assert over, "the case is to have layouts that do not fit"
    number = len(layouts[0]) + 1
    tab.ask(f"document.querySelector('#layouts tbody tr[data-number=\"{number}\"]')?.click()")
    if tab.ask(f"document.querySelector('#layouts tbody tr[data-number=\"{number}\"]') === null"):
        for key, name in (("tp", "tp"), ("zero", "zero"), ("dp", "dp"), ("microbatch", "sequences")):
            value = getattr(over[0].candidate, name)
            values = sorted({getattr(each.candidate, name) for each in (*layouts[0], *over)})
            move(tab, key, values.index(value) + 1)
        tab.ask(f"document.querySelector('#layouts tbody tr[data-number=\"{number}\"]').click()")
    tab.wait_until(f"document.querySelector('[data-picked]').dataset.picked === '{number}'")
    assert is_said_of(picked(tab), over[0])
    words = f"{over[0].missing / GIB:,.1f} GiB over"
    tab.wait_until(f"document.getElementById('picked_memory').textContent.includes('{words}')")
    assert (
        tab.ask("getComputedStyle(document.querySelector('#picked [data-value=verdict]')).color") == "rgb(179, 22, 42)"
    )


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1200), ("light", 360)])
def test_it_can_be_read(browser: Chromium, file: Path, scheme: str, width: int) -> None:
    tab = Tab(browser, file, scheme, width)
    assert tab.complaints() == []
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("document.documentElement.dataset.theme") == scheme
    tab.close()


def test_a_page_holds_as_many_layouts_as_fit(layouts) -> None:
    """The best of each setting of the sliders first."""
    many = [each for each in layouts[0] for _ in range(40)]
    most = 20_000
    fields, values = choose_rows(many, most)
    assert len(str(values)) < 1.3 * most
    places = [fields.index(key) for key, _ in CHOICES]
    kept = {tuple(row[place] for place in places) for row in values}
    firsts = list(dict.fromkeys(choice_of(each) for each in layouts[0]))
    assert kept == set(firsts[: len(kept)])
    numbers = [row[0] for row in values]
    assert numbers == sorted(numbers)


def test_it_is_small(file: Path) -> None:
    assert file.stat().st_size < MOST_BYTES
