"""Forecasts beside measured steps: which layouts are drawn, and which of a search's are measured."""

import random

import pytest

from framework.plan.candidate import Candidate
from framework.plan.search import Ranked
from scripts.bench.foresight_time import Choice, describe, draw_layouts, make_searched


def test_a_seed_draws_the_same_layouts_as_ever():
    # Errors of seeds are told in docs/foresight.md: others would be errors of other layouts.
    assert [describe(each) for each in draw_layouts(1, 4)] == [
        "z3 4 x 1 x 256 h192 L4 V8192",
        "cp2 z1 2 x 2 x 512 h192 L4 V8192",
        "dp2 pp2 z3 gpipe selective 4 x 1 x 256 h192 L4 V2048",
        "z0 selective 4 x 1 x 256 h192 L6 V8192",
    ]


@pytest.mark.parametrize("count", [8, 40, 500])
def test_the_chosen_and_the_fastest_of_each_mesh_are_measured(count):
    meshes = [{"dp": 2}] * 30 + [{"tp": 2}] * 30 + [{"pp": 2}] * 30 + [{"cp": 2}] * 10
    ranked = [Ranked(Candidate(**mesh), None) for mesh in meshes]
    choice = Choice(make_searched(2), ranked, (0, 17))
    places = choice.sample(random.Random(1), count)
    assert {0, 17, 30, 60, 90, *range(count // 4)} & set(range(100)) <= set(places)
    assert len(places) == len(set(places)) == min(count, 100)
    assert places == choice.sample(random.Random(1), count)
