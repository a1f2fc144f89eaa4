"""The comparison of two runs' evidence: the worst relative error of each quantity, and the parameter or step that has it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from framework.verify.evidence import Evidence

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}

# A tensor whose true value is zero (a key bias has no gradient: softmax does not see a shift) holds rounding noise only,
# and noise over noise says nothing. Errors are relative to the tensor's largest element, or to this share of the largest
# of all tensors of the quantity where that is more.
NOISE_SHARE = 1e-3


# Relative errors by quantity, then by step or parameter.
Errors = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Row:
    """One compared quantity: its worst relative error, the parameter or step that has it, and its own limit if it has one."""

    quantity: str
    error: float
    where: str
    within: float | None = None


def compare(found: Evidence, expected: Evidence) -> list[Row]:
    """The worst relative error of each quantity."""
    return [Row(quantity, *_worst(errors)) for quantity, errors in measure(found, expected).items()]


def measure(found: Evidence, expected: Evidence) -> Errors:
    """Relative errors of loss, gradient norm, every gradient and every weight. A missing or extra tensor is an infinite error,
    and so is anything that is not finite."""
    return {
        "loss": _measure_numbers(found.losses, expected.losses),
        "gradient norm": _measure_numbers(found.norms, expected.norms),
        "gradient, step 1": _measure_tensors(found.gradients, expected.gradients),
        f"weight, step {len(expected.losses)}": _measure_tensors(found.weights, expected.weights),
    }


def exceeds(rows: list[Row], tolerance: float) -> bool:
    """Whether any row is beyond its limit; a row without one has `tolerance`."""
    return any(row.error > (tolerance if row.within is None else row.within) for row in rows)


def render(rows: list[Row], tolerance: float) -> str:
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


def _measure_numbers(found: tuple[float, ...], expected: tuple[float, ...]) -> dict[str, float]:
    if len(found) != len(expected):
        return {f"{len(found)} steps, not {len(expected)}": float("inf")}
    pairs = enumerate(zip(found, expected, strict=True), start=1)
    return {f"step {step}": _finite(abs(a - b) / max(abs(b), 1e-30)) for step, (a, b) in pairs}


def _measure_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    if found.keys() != expected.keys():
        return {"only one side has " + ", ".join(sorted(found.keys() ^ expected.keys())): float("inf")}
    largest = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    floor = max(NOISE_SHARE * max(largest.values()), 1e-30)
    return {
        name: _finite(float((found[name].double() - tensor.double()).abs().max()) / max(largest[name], floor))
        for name, tensor in expected.items()
        if tensor.numel()
    }


def _worst(errors: Mapping[str, float]) -> tuple[float, str]:
    where = max(errors, key=errors.__getitem__)
    return errors[where], where


def _finite(error: float) -> float:
    return error if error == error else float("inf")
