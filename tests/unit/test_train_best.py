"""Which validation is the best of a run."""

import math

import pytest

from framework.train.loop import is_best


@pytest.mark.parametrize(
    ("loss", "former", "best"),
    [
        (2.0, None, True),
        (2.0, 3.0, True),
        (3.0, 3.0, False),
        (math.nan, None, False),
        (math.nan, 3.0, False),
        (math.inf, None, False),
        (2.0, math.nan, True),
    ],
)
def test_the_best_validation_is_the_lowest_finite_one(loss, former, best):
    assert is_best(loss, former) is best
