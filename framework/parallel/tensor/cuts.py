"""Cuts: how the indices along one dim of a weight divide among the tensor-parallel ranks.

A form says what lies along the dim. A rank takes the same heads everywhere, so the parts of one attention fit together:

    ""                  a row of features, divided anywhere (sizes differ by at most one)
    pair                gate | up, or any two halves used together
    heads               query heads
    kv_heads            key-value heads; fewer of them than ranks are held by several ranks each
    blocks              all query heads | all key heads | all value heads
    per_head            q k v of head 0 | q k v of head 1 | ...
    groups              the queries of group 0, its key, its value | group 1 | ...   (one group per key-value head)
    halves, kv_halves   two halves of the heads that are used in pairs (differential attention)
    quarters            four blocks of heads;  quarters_qvk: in each block the queries, the values, the keys (CodeGen)
    linear_key_heads, linear_value_heads, linear_channels      the gated delta net's, in Qwen's arrangement
"""

from collections.abc import Mapping
from dataclasses import dataclass

from framework.errors import TopologyError
from framework.mesh.layout import Shard

FORMS = (
    "", "pair", "heads", "kv_heads", "blocks", "per_head", "groups", "halves", "kv_halves", "quarters", "quarters_qvk",
    "linear_key_heads", "linear_value_heads", "linear_channels",
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """`shards`: of the dim, outermost first. `copied`: how many of the local indices, the last ones, other ranks hold as
    well; 0, all, or the keys and values of a packed weight."""

    shards: tuple[Shard, ...]
    copied: int


@dataclass(frozen=True)
class Counts:
    """What an attention consists of. `q`, `kv`: heads; `linear`: numbers of the linear forms, by form."""

    q: int
    kv: int
    linear: Mapping[str, tuple[int, ...]]

    def check(self, degree: int, where: str) -> None:
        """Raises TopologyError when the heads do not divide among `degree` ranks, with the degrees that do."""
        if not self.divides(degree):
            legal = [each for each in range(1, self.q + 1) if self.divides(each)]
            linear = "".join(f", {name} {sizes}" for name, sizes in self.linear.items())
            raise TopologyError(
                f"parallel.tp={degree} does not divide the {self.q} heads with {self.kv} key-value heads{linear} of {where}:"
                f" use parallel.tp in {legal}"
            )

    def divides(self, degree: int) -> bool:
        """Every rank gets equally many heads, and whole key-value heads."""
        return (
            self.q % degree == 0
            and (self.kv % degree == 0 or degree % self.kv == 0)
            and all(size % degree == 0 for sizes in self.linear.values() for size in sizes)
        )


def cut(form: str, dim: int, size: int, counts: Counts, index: int, degree: int) -> Cut:
    """The cut of a dim of `size` indices for rank `index` of `degree`. Raises TopologyError when the form does not divide."""
    if form == "groups" and degree > counts.kv:
        return _cut_within_groups(dim, size, counts, index, degree)
    parts = _parts(form, size, counts, degree)
    total = sum(heads for heads, _ in parts)
    if size % total or (form not in ("", "pair") and any(heads % pieces for heads, pieces in parts)):
        raise TopologyError(
            f"parallel.tp={degree} does not divide {size} indices arranged as {form or 'features'} of {counts.q} heads and"
            f" {counts.kv} key-value heads: use a smaller parallel.tp"
        )
    unit = size // total
    pieces = tuple(each for _, each in parts)
    is_whole = all(each == degree for each in pieces)
    shard = Shard(
        "tp",
        dim,
        index,
        degree,
        tuple(heads * unit for heads, _ in parts) if len(parts) > 1 else (),
        () if is_whole else pieces,
    )
    return Cut((shard,), sum(heads // each * unit for heads, each in parts if each < degree))


def _parts(form: str, size: int, counts: Counts, degree: int) -> list[tuple[int, int]]:
    """(units, pieces) of each segment of the dim."""
    kv_pieces = min(degree, counts.kv)
    half, half_kv, quarter = counts.q // 2, counts.kv // 2, counts.q // 4
    match form:
        case "":
            return [(size, degree)]
        case "pair":
            return [(size // 2, degree)] * 2
        case "heads" | "per_head":
            return [(counts.q, degree)]
        case "kv_heads" | "groups":
            return [(counts.kv, kv_pieces)]
        case "blocks":
            return [(counts.q, degree), (counts.kv, kv_pieces), (counts.kv, kv_pieces)]
        case "halves":
            return [(half, degree)] * 2
        case "kv_halves":
            return [(half_kv, min(degree, half_kv))] * 2
        case "quarters":
            return [(quarter, degree)] * 4
        case "quarters_qvk":
            return [(quarter, degree)] * 12
    return [(units, degree) for units in counts.linear[form]]


def _cut_within_groups(dim: int, size: int, counts: Counts, index: int, degree: int) -> Cut:
    """Several ranks share a group: each has part of its queries, and all have its key and its value."""
    copies = degree // counts.kv
    queries = counts.q // counts.kv
    unit = size // counts.kv // (queries + 2)
    group = Shard("tp", dim, index, degree, (), (counts.kv,))
    within = Shard("tp", dim, index % copies, copies, (queries * unit, unit, unit), (copies, 1, 1))
    return Cut((group, within), 2 * unit)
