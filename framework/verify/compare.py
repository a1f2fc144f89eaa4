"""Two evidences side by side: the worst relative error of each quantity, and whose it is."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from framework.verify.evidence import Evidence

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}

# A tensor whose true value is zero (a key bias has no gradient: softmax does not see a shift) holds rounding noise only,
# and noise over noise says nothing. Errors are relative to the tensor's largest element, or to this share of the largest
# of all tensors of the quantity where that is more.
NOISE_SHARE = 1e-3


@dataclass(frozen=True)
class Row:
    """One compared quantity: its worst relative error and the parameter or step that has it."""

    quantity: str
    error: float
    where: str


def compare(found: Evidence, expected: Evidence) -> list[Row]:
    """Worst relative errors of loss, gradient norm, every gradient and every weight. A missing or extra tensor is an
    infinite error, and so is anything that is not finite."""
    return [
        _compare_numbers("loss", found.losses, expected.losses),
        _compare_numbers("gradient norm", found.norms, expected.norms),
        _compare_tensors("gradient, step 1", found.gradients, expected.gradients, {}),
        _compare_tensors(f"weight, step {len(expected.losses)}", found.weights, expected.weights, expected.undecided),
    ]


def render(rows: list[Row], tolerance: float) -> str:
    """The table, one row a quantity, with its verdict."""
    width = max(len(row.where) for row in rows)
    lines = [f"{'quantity':<18} {'worst relative error':>20}  {'at':<{width}}  within {tolerance:g}"]
    for row in rows:
        verdict = "yes" if row.error <= tolerance else "NO"
        lines.append(f"{row.quantity:<18} {row.error:>20.2e}  {row.where:<{width}}  {verdict}")
    return "\n".join(lines)


def _compare_numbers(quantity: str, found: tuple[float, ...], expected: tuple[float, ...]) -> Row:
    if len(found) != len(expected):
        return Row(quantity, float("inf"), f"{len(found)} steps, not {len(expected)}")
    errors = [_finite(abs(a - b) / max(abs(b), 1e-30)) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Row(quantity, errors[worst], f"step {worst + 1}")


def _compare_tensors(
    quantity: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], ignored: Mapping[str, Tensor]
) -> Row:
    if found.keys() != expected.keys():
        return Row(quantity, float("inf"), "only one side has " + ", ".join(sorted(found.keys() ^ expected.keys())))
    largest = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    floor = max(NOISE_SHARE * max(largest.values()), 1e-30)
    errors = {}
    for name, tensor in expected.items():
        if tensor.numel():
            difference = (found[name].double() - tensor.double()).abs()
            if name in ignored:
                difference[ignored[name]] = 0.0
            errors[name] = _finite(float(difference.max()) / max(largest[name], floor))
    worst = max(errors, key=errors.__getitem__)
    return Row(quantity, errors[worst], worst)


def _finite(error: float) -> float:
    return error if error == error else float("inf")
