"""A round of grid parts is the whole grid, and a part's number repeats its cases."""

from types import SimpleNamespace

import pytest

from tests.grid import EVERY_DAY, NUM_PARTS, SECONDS_PER_DAY, part_of, part_of_day, part_of_item

CASES = [f"tests/ranks/test_x.py::test_layout[family{number}-zero3]" for number in range(2_000)]


def test_days_in_a_row_cover_every_case_once():
    for first_day in (0, 20_000, 20_779):
        parts = [part_of_day((first_day + day) * SECONDS_PER_DAY + 3_600) for day in range(NUM_PARTS)]
        assert sorted(parts) == list(range(NUM_PARTS))
    assert {part_of(case) for case in CASES} <= set(range(NUM_PARTS))


def test_parts_are_of_about_equal_size():
    sizes = [sum(part_of(case) == part for case in CASES) for part in range(NUM_PARTS)]
    assert min(sizes) > len(CASES) / NUM_PARTS / 2, sizes


def item(*marks: pytest.MarkDecorator) -> SimpleNamespace:
    """A test with these marks, the closest first."""
    found = {each.mark.name: each.mark for each in reversed(marks)}
    return SimpleNamespace(nodeid=CASES[1], get_closest_marker=found.get)


def test_a_mark_says_the_part_of_tests_that_belong_together():
    assert part_of_item(item(pytest.mark.grid)) == part_of(CASES[1]) == 9
    assert part_of_item(item(pytest.mark.grid(part=5))) == 5
    assert part_of_item(item(pytest.mark.needs("a"))) is None
    assert part_of_item(item(EVERY_DAY)) is None
    assert part_of_item(item(pytest.mark.grid, EVERY_DAY)) == 9  # a row of a file of every day
    with pytest.raises(AssertionError, match="the parts are 0 to 27"):
        part_of_item(item(pytest.mark.grid(part=28)))


def test_a_case_stays_in_its_part():
    """Its name alone decides: this machine, or a case that is added, changes nothing."""
    assert [part_of(case) for case in CASES[:5]] == [14, 9, 26, 26, 2]
