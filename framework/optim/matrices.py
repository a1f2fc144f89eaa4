"""Matrices of a model's layers, which Muon updates: which weights they are, and how several lie packed in one.

A matrix is a weight of two dims of a decoder layer that is no embedding, norm or bias, or one expert's of a stacked weight. Gate
and up, or q, k and v, that lie in one weight are matrices each; with `optim.muon.heads` so is what an attention's projection has
of each head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.model.experts import find_experts, find_stock_experts
from framework.model.units import Unit
from framework.parallel.tensor.find_regions import RegionPlan, find_regions
from framework.parallel.tensor.partition import FEATURES, Counts, count_heads
from framework.parallel.tensor.rules import holder
from framework.recipe.schema import Optim

# Rows from which on a symmetric matrix is worth three matmuls for the blocks that make it, in place of one for all of it.
SYMMETRIC_ROWS = 512


@dataclass(frozen=True)
class MatrixForm:
    """The matrices packed in a weight [a, b]: `blocks` equal ones along `dim`, with an owner each, and in a block `repeats` times
    one after another, `sizes` units of each matrix.

    Gate and up in halves: repeats 1, sizes (1, 1); interleaved: a repeat for each pair. q, k and v of each head: a repeat for
    each head. Heads one by one: a block for each.
    """

    dim: int = 0
    repeats: int = 1
    sizes: tuple[int, ...] = (1,)
    blocks: int = 1

    def split(self, weight: Tensor) -> list[Tensor]:
        """The matrices of a block [a, b]."""
        grouped = weight.unflatten(self.dim, (self.repeats, -1))
        unit = grouped.shape[self.dim + 1] // sum(self.sizes)
        pieces = grouped.split([size * unit for size in self.sizes], self.dim + 1)
        return [piece.flatten(self.dim, self.dim + 1) for piece in pieces]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The block [a, b] of its matrices: the inverse of `split`."""
        grouped = [each.unflatten(self.dim, (self.repeats, -1)) for each in matrices]
        return cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1)

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of a block of a weight [..., a, b]."""
        *_, a, b = shape
        return (a // self.blocks, b) if self.dim == 0 else (a, b // self.blocks)

    def shapes(self, block: tuple[int, int]) -> list[tuple[int, int]]:
        """The shapes of the matrices of a block of this shape."""
        unit = block[self.dim] // (self.repeats * sum(self.sizes))
        lengths = [self.repeats * size * unit for size in self.sizes]
        return [(length, block[1]) if self.dim == 0 else (block[0], length) for length in lengths]

    def flops(self, shape: Sequence[int], steps: int, ranks: int = 1) -> int:
        """FLOPs of the iterations for a block of a weight [..., a, b], of each of the ranks that share it."""
        return sum(count_flops(each, steps, ranks) for each in self.shapes(self.block(shape)))


def count_flops(shape: tuple[int, int], steps: int, ranks: int = 1) -> int:
    """FLOPs of the iterations that make one matrix orthogonal, of each of the ranks that share it (`muon.py`)."""
    short, long = sorted(shape)
    columns, rows = -(-long // ranks), -(-short // ranks)
    # X X^T is symmetric, and its square where one rank makes all its rows.
    symmetric, others = (columns + rows, columns) if ranks == 1 else (columns, columns + rows)
    quarters = 3 if short >= SYMMETRIC_ROWS else 4
    return steps * (2 * short * short * symmetric * quarters // 4 + 2 * short * short * others)


def find_matrices(
    model: PreTrainedModel, units: Sequence[Unit], tp_plan: Mapping[str, str], optim: Optim
) -> dict[str, MatrixForm]:
    """The form of each weight of the layers that holds matrices for Muon, by name. tp_plan: `model.tp_plan`.

    Raises ModelError where heads are asked for and not known."""
    if optim.name != "muon":
        return {}
    by_heads = optim.muon.heads
    experts = {f"{name}.{weight}": form for name, weight, form in _find_stacked(model)}
    # All experts of dbrx are rows of one weight, which is no matrix, and of which ranks of ep have parts.
    stock = {id(each) for _, module, _ in find_stock_experts(model) for each in module.parameters()}
    packed = dict(_find_packed(model, units, tp_plan, by_heads))
    if by_heads and all(form.blocks == 1 for form in packed.values()):
        raise _refuse(model, "no projection of heads was found")
    matrices = {}
    for name in (name for unit in units if unit.name.startswith("layers.") for name in unit.parameters):
        owner, weight = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
        if name in experts:
            matrices[name] = experts[name]
        elif weight.ndim == 2 and not isinstance(owner, nn.Embedding) and id(weight) not in stock:
            matrices[name] = packed.get(name, MatrixForm())
    return matrices


def _find_stacked(model: PreTrainedModel) -> Iterator[tuple[str, str, MatrixForm]]:
    """(module, weight, form) of stacked experts [E, a, b]."""
    for name, experts, form in find_experts(model):
        dim = 1 if form.is_transposed else 0
        features = experts.get_parameter(form.first).shape[1 + dim] // 2
        packed = MatrixForm(dim, 1 if form.is_concatenated else features, (1, 1))
        yield name, form.first, packed if form.has_gate else MatrixForm()
        yield name, form.last, MatrixForm()


def _find_packed(
    model: PreTrainedModel, units: Sequence[Unit], tp_plan: Mapping[str, str], by_heads: bool
) -> Iterator[tuple[str, MatrixForm]]:
    """The weights of linear layers that hold several matrices, by the roles that tensor parallelism knows them by."""
    try:
        names = [name for unit in units for name in unit.modules]
        regions = find_regions(model, tp_plan, names, has_whole_experts=True)
    except ModelError as error:
        if by_heads:
            raise _refuse(model, f"where they lie is not known: {error}") from error
        return  # a family whose roles are not known: each weight is one matrix
    for region in regions:
        arranged = {name: role.arrangement for name, role in region.roles.items() if role.kind == "column"}
        has_heads = any(each not in FEATURES for each in arranged.values())
        counts = count_heads(model, region) if has_heads else Counts(1, 1)
        for name, arrangement in arranged.items():
            repeats, sizes = _packing(arrangement, counts)
            if len(sizes) > 1:
                yield f"{name}.weight", MatrixForm(int(isinstance(model.get_submodule(name), Conv1D)), repeats, sizes)
        if by_heads and has_heads:  # last, and counts where a name comes twice
            yield from _find_heads(model, region, counts)


def _find_heads(model: PreTrainedModel, region: RegionPlan, counts: Counts) -> Iterator[tuple[str, MatrixForm]]:
    """The weights of an attention that hold something of each head: projections to queries, keys and values, and from outputs."""
    for name, role in region.roles.items():
        module = model.get_submodule(name)
        is_column = role.kind == "column" and role.arrangement not in FEATURES
        if not isinstance(module, (nn.Linear, Conv1D)) or not (is_column or role.kind == "row"):
            continue
        if role.arrangement in counts.linear:
            raise _refuse(model, f"{name} has those of a recurrent mixer")
        if counts.linear:  # a mixer of channels
            continue
        if counts.blocks > 1 and role.arrangement == "":
            raise _refuse(model, f"{name} reads them in pairs")
        repeats, sizes = _packing(role.arrangement, counts)
        number = repeats * sum(sizes) if is_column else counts.q
        dim = int(isinstance(module, Conv1D) == is_column)
        size = module.weight.shape[dim]
        if size % number:
            raise _refuse(model, f"{size} features of {name} are not of {number} heads alike")
        if size > number:  # else a number for each head
            parts = _packing_of_head(name, size // number, vars(model.get_submodule(holder(name))))
            yield f"{name}.weight", MatrixForm(dim, 1, parts, number)


def _packing_of_head(name: str, width: int, attention: Mapping[str, Any]) -> tuple[int, ...]:
    """`MatrixForm.sizes` of a head of so many features: keys without positions beside values, or queries beside gates."""
    last = name.rpartition(".")[2]
    if last in ("kv_b_proj", "q_gate_proj"):
        return attention["qk_nope_head_dim" if last == "kv_b_proj" else "qk_head_dim"], attention["v_head_dim"]
    return (1, 1) if last == "q_proj" and width == 2 * attention.get("head_dim", width) else (1,)


def _packing(arrangement: str, counts: Counts) -> tuple[int, tuple[int, ...]]:
    """(repeats, sizes) of `MatrixForm` for an arrangement of `partition.py`; units are heads where there are any."""
    q, kv, blocks = counts.q, counts.kv, counts.blocks
    found = {
        "pair": (1, (1, 1)),
        "heads": (1, (q,)),
        "kv_heads": (1, (kv,)),
        "qkv": (1, (q, kv, kv)),
        "per_head": (q, (1, 1, 1)),
        "groups": (kv, (q // kv, 1, 1)),
        "block_qvk": (blocks, (q // blocks,) * 3),
    }
    return found.get(arrangement, (1, (1,)))


def _refuse(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"optim.muon.heads: heads of {model.config.model_type} models are no matrices of their own: {reason}. Set it to false"
    )
