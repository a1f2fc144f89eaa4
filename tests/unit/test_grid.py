"""A week of grid parts is the whole grid, and a part's number repeats its cases."""

from tests.grid import NUM_PARTS, SECONDS_PER_DAY, part_of, part_of_day

CASES = [f"tests/ranks/test_x.py::test_layout[family{number}-zero3]" for number in range(400)]


def test_seven_days_in_a_row_cover_every_case_once():
    for first_day in (0, 20_000, 20_779):
        parts = [part_of_day((first_day + day) * SECONDS_PER_DAY + 3_600) for day in range(NUM_PARTS)]
        assert sorted(parts) == list(range(NUM_PARTS))
    assert {part_of(case) for case in CASES} <= set(range(NUM_PARTS))


def test_parts_are_of_about_equal_size():
    sizes = [sum(part_of(case) == part for case in CASES) for part in range(NUM_PARTS)]
    assert min(sizes) > len(CASES) / NUM_PARTS / 2, sizes


def test_a_case_stays_in_its_part():
    """Its name alone decides: this machine, or a case that is added, changes nothing."""
    assert [part_of(case) for case in CASES[:5]] == [0, 2, 5, 5, 2]
