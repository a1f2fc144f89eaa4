"""Comparison of two runs' evidence: fixed tolerances, limits measured on rounding alone, and distributions of initial values.

`compare` gives the worst relative error of each quantity, and the parameter or step that has it.

`judge` has limits that are measured. The oracle trains in a narrow dtype from the same weights, and again from weights that are
rounded differently. The distance of these references from the oracle in a wider dtype is the effect of rounding on this model,
for each parameter; a layout may be SPREAD times as far away. In bf16 and fp16, where no fixed tolerance fits all models, these
are the limits. In fp32 they distinguish rounding from a fault of fp32 alone, where the layout is beyond the tolerance and equal
in fp64.

`compare_initial` compares random values by their distribution, with limits that chance exceeds once in 1e9 times: mean and
variance; the two-sample Kolmogorov-Smirnov statistic, which sees any other shape; and how many numbers of one side are larger
than all of the other, which sees bounds (a normal and a truncated normal). A parameter that stock fills with one number must be
equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from framework.verify.evidence import Evidence, NothingToCompare

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}

# A tensor whose true value is zero (a key bias has no gradient: softmax does not see a shift) holds rounding noise only,
# and noise over noise says nothing. Errors are relative to the tensor's largest element, or to this share of the largest
# of all tensors of the quantity where that is more.
NOISE_SHARE = 1e-3

NUM_REFERENCES = 4
SPREAD = 4.0
# The smallest bounds: one rounding of fp8 (e4m3), bf16 or fp16, the tolerance of fp32. A reference may be closer by chance.
LEAST = {"fp8": 2.0**-4, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-5}
# A bound above this says next to nothing about a tensor; the output names it.
LOOSE = 0.5

# Standard deviations of a mean. The statistic's limit is sqrt(-ln(1e-9 / 2) / 2). Of equally many numbers k are beyond the other
# side's with the chance 2^-k.
DEVIATIONS, STATISTIC, BEYOND = 6.2, 3.28, 30
FEW = 30  # of fewer numbers nothing can be said

# Relative errors by quantity, then by step or parameter.
Errors = dict[str, dict[str, float]]


@dataclass(frozen=True)
class ErrorRow:
    """One compared quantity: its worst relative error, the parameter or step that has it, and its own limit if it has one."""

    quantity: str
    error: float
    where: str
    within: float | None = None


def compare(found: Evidence, expected: Evidence) -> list[ErrorRow]:
    """The worst relative error of each quantity."""
    return [ErrorRow(quantity, *worst(errors)) for quantity, errors in measure(found, expected).items()]


def measure(found: Evidence, expected: Evidence) -> Errors:
    """Relative errors of loss, gradient norm, every gradient and every weight. A missing or extra tensor is an infinite error,
    and so is anything that is not finite."""
    averages = {"average": measure_tensors(found.averages, expected.averages)} if expected.averages else {}
    return averages | {
        "loss": measure_numbers(found.losses, expected.losses),
        "gradient norm": measure_numbers(found.norms, expected.norms),
        "gradient, step 1": measure_tensors(found.gradients, expected.gradients),
        f"weight, step {len(expected.losses)}": measure_tensors(found.weights, expected.weights),
    }


def exceeds(rows: list[ErrorRow], tolerance: float) -> bool:
    """Whether any row is beyond its limit; a row without one has `tolerance`."""
    return any(row.error > (tolerance if row.within is None else row.within) for row in rows)


def render(rows: list[ErrorRow], tolerance: float) -> str:
    """The table as text, with a row and a verdict for each quantity."""
    width = max(len(row.where) for row in rows)
    own = any(row.within is not None for row in rows)
    title = "within" if own else f"within {tolerance:g}"
    lines = [f"{'quantity':<18} {'worst relative error':>20}  {'at':<{width}}  {title}"]
    for row in rows:
        verdict = "NO" if exceeds([row], tolerance) else "yes"
        limit = f"{row.within:8.2e}  " if row.within is not None else ""
        lines.append(f"{row.quantity:<18} {row.error:>20.2e}  {row.where:<{width}}  {limit}{verdict}")
    return "\n".join(lines)


def measure_numbers(found: tuple[float, ...], expected: tuple[float, ...]) -> dict[str, float]:
    """Relative errors of a value of each step, by step."""
    if len(found) != len(expected):
        return {f"{len(found)} steps, not {len(expected)}": float("inf")}
    pairs = enumerate(zip(found, expected, strict=True), start=1)
    return {f"step {step}": _finite(abs(a - b) / max(abs(b), 1e-30)) for step, (a, b) in pairs}


def measure_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative errors of tensors, by name."""
    if found.keys() != expected.keys():
        return {"only one side has " + ", ".join(sorted(found.keys() ^ expected.keys())): float("inf")}
    largest = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    floor = max(NOISE_SHARE * max(largest.values()), 1e-30)
    return {
        name: _finite(float((found[name].double() - tensor.double()).abs().max()) / max(largest[name], floor))
        for name, tensor in expected.items()
        if tensor.numel()
    }


def worst(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error, and where it is."""
    where = max(errors, key=errors.__getitem__)
    return errors[where], where


def _finite(error: float) -> float:
    return error if error == error else float("inf")


def judge(found: Evidence, references: Sequence[Evidence], truth: Evidence, dtype: str) -> list[ErrorRow]:
    """A row for each quantity: the step or parameter with the largest error relative to its bound."""
    errors, bounds = measure(found, truth), find_bounds(references, truth, dtype)
    rows = []
    for quantity, of in errors.items():
        limits = bounds[quantity]
        where = max(of, key=lambda name: of[name] / limits.get(name, LEAST[dtype]))
        rows.append(ErrorRow(quantity, of[where], where, limits.get(where, LEAST[dtype])))
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


def compare_initial(found: Mapping[str, Tensor], config: PretrainedConfig) -> dict[str, float]:
    """The worst measure over its limit, by parameter; above 1 the distributions differ. found: whole initial values by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    if found.keys() != stock.keys():
        return {f"only one side has {', '.join(sorted(found.keys() ^ stock.keys()))}": float("inf")}
    return {
        name: max(_measure(found[name].flatten().double(), value.detach().flatten().double()))
        for name, value in stock.items()
        if value.numel()
    }


def _measure(found: Tensor, stock: Tensor) -> Iterator[float]:
    if bool((stock == stock[0]).all()):
        yield 0.0 if torch.equal(found, stock) else float("inf")
        return
    if not bool(found.isfinite().all()):
        yield float("inf")
        return
    if len(stock) < FEW:
        yield 0.0
        return
    both = torch.cat([found, stock])
    for moment in (1, 2):  # mean and spread: their standard errors are those of a mean of powers
        power = (both - both.mean()) ** moment if moment > 1 else both
        ours, theirs = power.tensor_split(2)
        yield float((ours.mean() - theirs.mean()).abs() / (DEVIATIONS * power.std() * (2 / len(stock)) ** 0.5))
    values = both.sort().values
    shares = [torch.searchsorted(each.sort().values, values, right=True) / len(each) for each in (found, stock)]
    yield float((shares[0] - shares[1]).abs().max() / (STATISTIC * (2 / len(stock)) ** 0.5))
    for one, other in ((found.abs(), stock.abs()), (stock.abs(), found.abs())):
        yield int((one > other.max()).sum()) / BEYOND
