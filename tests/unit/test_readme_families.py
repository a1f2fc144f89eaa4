"""README's table of families is what the code does with them: `python -m tests.unit.test_readme_families` writes it anew."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from framework.comm.communicator import Communicator
from framework.errors import MeshwrightError
from framework.mesh.topology import Axis
from framework.model.load import build_meta
from framework.parallel.tensor.heads import ranks_per_kv_head
from tests.families import FAMILIES, Family, build_config
from tests.grid import IN_TURN
from tests.ranks.tensor_parity import split
from tests.ranks.test_tensor import CHANGES

pytestmark = IN_TURN

README = Path(__file__).parents[2] / "README.md"
FIRST, LAST = "<!-- families: written by tests/unit/test_readme_families.py -->", "<!-- end of families -->"
DEGREE = 2


def held(family: Family) -> str:
    """Whether two tensor-parallel ranks share the family's weights, or why it is refused."""
    config = build_config(family, **CHANGES.get(family.name, {}))
    copies = ranks_per_kv_head(config, DEGREE)
    tp, kv = Communicator(Axis("tp", DEGREE, 0, (0, 1))), Communicator(Axis("kv", copies, 0, tuple(range(copies))))
    try:
        layouts = split(build_meta(config), tp, kv, sequence=True).values()
    except MeshwrightError as error:
        return f"refused: {str(error).splitlines()[0]}"
    whole, local = sum(prod(layout.shape) for layout in layouts), sum(layout.numel_local for layout in layouts)
    # Norms, routers, position tables and the down-projections of latent attention are all that both hold.
    assert local < 0.6 * whole, f"{family.name}: each of {DEGREE} ranks holds {local} of {whole} weights"
    return "split"


def write_table() -> Iterator[str]:
    yield "| `parallel.tp` | families |"
    yield "|---|---|"
    found: dict[str, list[str]] = {}
    for family in FAMILIES:
        found.setdefault(held(family), []).append(family.name)
    for how, names in sorted(found.items(), reverse=True):
        yield f"| {how} | {', '.join(sorted(names))} |"


def with_table(readme: str) -> str:
    before, after = readme.split(FIRST)[0], readme.split(LAST)[1]
    return before + "\n".join([FIRST, "", *write_table(), "", LAST]) + after


def test_the_table_of_families_is_what_the_code_does() -> None:
    text = README.read_text()
    assert text == with_table(text), "python -m tests.unit.test_readme_families"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
