"""The figures of the site show what the code says today."""

from scripts import docs_figures
from tests.grid import IN_TURN

pytestmark = IN_TURN


def test_the_numbers_are_the_codes_of_today():
    written = docs_figures.DATA.read_text(encoding="utf-8")
    assert written == docs_figures.write_data(), "python scripts/docs_figures.py writes docs/figures/data.js anew"


def test_each_figure_has_its_script_its_picture_and_a_page():
    names = {each.__name__ for each in docs_figures.FIGURE_DATA}
    pages = "".join(path.read_text(encoding="utf-8") for path in docs_figures.FIGURES.parent.glob("*.md"))
    for name in names:
        assert (docs_figures.FIGURES / f"{name}.js").read_text().count(f'figures.add("{name}"') == 1
        assert (docs_figures.FIGURES / f"{name}.png").stat().st_size < 120_000
        assert f"](figures/{name}.png)" in pages
    assert {path.stem for path in docs_figures.FIGURES.glob("*.png")} == names


def test_a_ring_sends_what_the_formula_says():
    for ranks, found in docs_figures.ring()["ranks"].items():
        sent = [sum(rank == each for rank, _ in step["sends"]) for step in found["steps"] for each in range(ranks)]
        assert len(found["steps"]) == 2 * (ranks - 1) + 1
        assert sum(sent) == ranks * 2 * (ranks - 1), "each rank sends a chunk of 1/n in each of 2(n-1) steps"


def test_a_zig_zag_is_even_and_computes_every_pair_once():
    for degree, cuts in docs_figures.context()["degrees"].items():
        for name, cut in cuts.items():
            assert sum(map(sum, cut["pairs"])) == 64 * 65 // 2
            for step, pairs in enumerate(cut["pairs"]):
                # A rank's own keys are even in either cut; those of others are what zig-zag is for.
                assert (len(set(pairs)) == 1) == (name == "zig-zag" or step == 0), (degree, name, step)
