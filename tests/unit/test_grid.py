"""A round of grid parts is the whole grid, and a part's number repeats its cases."""

from types import SimpleNamespace

import pytest

from tests.grid import IN_TURN, NUM_PARTS, SECONDS_PER_DAY, TURN, is_in_part, part_of, part_of_day

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


def parts_of(*marks: pytest.MarkDecorator) -> list[int]:
    """The parts in which a test with these marks runs."""
    return [part for part in range(NUM_PARTS) if is_in_part(item(*marks), part)]


def test_a_mark_says_the_part_of_tests_that_belong_together():
    assert parts_of(pytest.mark.grid) == [part_of(CASES[1])] == [9]
    assert parts_of(pytest.mark.grid(part=5)) == [5]
    assert parts_of(pytest.mark.needs("a")) == list(range(NUM_PARTS))
    assert parts_of(pytest.mark.grid, IN_TURN) == [9]  # a row of a file that has turns
    with pytest.raises(AssertionError, match="the parts are 0 to 27"):
        parts_of(pytest.mark.grid(part=28))


def test_a_file_has_its_turn_within_four_days_and_its_tests_together():
    first = part_of("tests/ranks/test_x.py") % TURN
    assert parts_of(IN_TURN) == list(range(first, NUM_PARTS, TURN)), "of the file's name alone"


def test_a_case_stays_in_its_part():
    """Its name alone decides: this machine, or a case that is added, changes nothing."""
    assert [part_of(case) for case in CASES[:5]] == [14, 9, 26, 26, 2]
