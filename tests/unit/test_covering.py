"""A covering leaves out no pair of values that may meet."""

from itertools import combinations, product

from tests.ranks.covering import cover_pairs

FACTORS = ((0, 1, 2), "abcd", (False, True))


def test_a_covering_has_every_pair_and_few_rows() -> None:
    rows = cover_pairs(FACTORS, lambda x, y, z: (x, y) != (0, "a"))
    assert len(rows) < 16
    for one, other in combinations(range(3), 2):
        expected = set(product(FACTORS[one], FACTORS[other]))
        assert {(row[one], row[other]) for row in rows} == expected - {(0, "a")}
