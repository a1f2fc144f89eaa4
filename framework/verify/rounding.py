"""Error bounds measured on rounding alone: the oracle in a narrow dtype compared with itself in a wider one.

The oracle trains in the narrow dtype from the same weights, and again from weights that are rounded differently. The distance of
these references from the wide oracle is the effect of rounding on this model, measured for each parameter; a layout may be SPREAD
times as far away. In bf16 and fp16, where no fixed tolerance fits all models, these are the bounds. In fp32 they tell rounding
from a fault of fp32 alone, where the layout is beyond the tolerance and equal in fp64.
"""

from collections.abc import Sequence
from math import inf

from framework.verify.compare import Errors, Row, measure
from framework.verify.evidence import Evidence, NothingToCompare

NUM_REFERENCES = 4
SPREAD = 4.0
# The smallest bounds: one rounding of fp8 (e4m3), bf16 or fp16, the tolerance of fp32. A reference may be closer by chance.
LEAST = {"fp8": 2.0**-4, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-5}
# A bound above this says next to nothing about a tensor, and the user is told so.
LOOSE = 0.5


def judge(found: Evidence, references: Sequence[Evidence], truth: Evidence, dtype: str) -> list[Row]:
    """A row for each quantity: the step or parameter with the largest error relative to its bound."""
    errors, bounds = measure(found, truth), find_bounds(references, truth, dtype)
    rows = []
    for quantity, of in errors.items():
        limits = bounds[quantity]
        where = max(of, key=lambda name: of[name] / limits.get(name, LEAST[dtype]))
        rows.append(Row(quantity, of[where], where, limits.get(where, LEAST[dtype])))
    return rows


def find_bounds(references: Sequence[Evidence], truth: Evidence, dtype: str) -> Errors:
    """SPREAD times the references' worst error: for each parameter, and for losses and norms over all steps together.

    Raises NothingToCompare if a reference does not stay finite, since it bounds nothing.
    """
    measured = [measure(reference, truth) for reference in references]
    endless = [f"{quantity}, {at}" for each in measured for quantity, of in each.items() for at in of if of[at] == inf]
    if endless:
        raise NothingToCompare(
            f"there is nothing to compare with: one process in {dtype} does not stay finite ({endless[0]}). A lower optim.lr or"
            " fewer --steps may do"
        )
    bounds: Errors = {}
    for quantity, errors in measured[0].items():
        worst = {where: max(each[quantity].get(where, 0.0) for each in measured) for where in errors}
        if quantity in ("loss", "gradient norm"):
            worst = dict.fromkeys(worst, max(worst.values()))
        bounds[quantity] = {where: max(SPREAD * error, LEAST[dtype]) for where, error in worst.items()}
    return bounds


def find_loose(bounds: Errors) -> list[str]:
    """Names of the parameters whose gradients have bounds that say next to nothing."""
    return [name for name, bound in bounds["gradient, step 1"].items() if bound > LOOSE]
