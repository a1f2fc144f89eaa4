"""QK-clip: attention logits bounded by their projections (MuonClip, Kimi Team 2025, arXiv 2507.20534, section 2.1).

    after an update, for each key head g with S_g > t:    W_q, W_k of the head <- (t / S_g)^(1/2) of them

S_g is the largest logit of the step (`parallel/attention/attention.py`), over all ranks: one all-reduce of a number a head.
Biases are scaled with their weights, and all queries of a group with its key. Each rank scales the elements that it owns.
`find_qk_rows` says which rows of a model's projections are of which head.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.transfer import fetch
from framework.errors import ModelError
from framework.model.units import Unit
from framework.optim.update_clipping import ParameterPart
from framework.optim.update_rules import FlatShard
from framework.parallel.attention.attention import LogitMaxima
from framework.parallel.attention.hook import QUERY_RULES, find_attentions
from framework.parallel.tensor.find_regions import find_regions
from framework.parallel.tensor.partition import Counts, count_heads
from framework.parallel.tensor.rules import HEAD_NORMS, Role
from framework.recipe.schema import Optim, Recipe

# Roles of rows of a projection: the power of a head's factor by which they are scaled. A key that all heads share, as the rotary
# one of latent attention, stays as it is, and the queries that meet it take its share (Kimi Team 2025, arXiv 2507.20534, 2.1).
QUERY, KEY, VALUE, QUERY_OF_SHARED = 0.5, 0.5, 0.0, 1.0
Units = list[tuple[int, float]]


@dataclass(frozen=True)
class QkRows:
    """The indices along `dim` of a weight or bias of attention `layer`: heads, the key head of each, and powers, of the factor of
    that head; [n] each, on the CPU."""

    layer: int
    dim: int
    heads: Tensor
    powers: Tensor


def find_qk_rows(
    recipe: Recipe, model: PreTrainedModel, units: Sequence[Unit], trained: Collection[str], stock: str | None
) -> dict[str, QkRows]:
    """The rows of queries and keys in the whole model, by parameter; none without QK-clip. trained: parameters; stock: the reason
    why attention is left to transformers.

    Raises ModelError where logits are not a product of such rows, or where they cannot be scaled."""
    if recipe.optim.qk_clip is None:
        return {}
    if stock is not None:
        raise _refuse(
            model.config, f"they are known to our attention only, and layers attend by transformers' ({stock})"
        )
    attentions = {id(each) for each in find_attentions(model)}
    rows: dict[str, QkRows] = {}
    regions = find_regions(model, recipe.model.tp_plan, [name for unit in units for name in unit.modules])
    for layer, unit in enumerate(unit for unit in units if unit.is_layer):
        own = [region for region in regions if region.name.startswith(f"{unit.root}.")]
        for region in (each for each in own if id(model.get_submodule(each.name)) in attentions):
            for name, role in region.roles.items():
                rows |= _read_rows(model, layer, name, role, count_heads(model, region))
    if not rows:
        raise _refuse(model.config, "no projection of queries and keys was found")
    if frozen := [name for name in rows if name not in trained]:
        raise _refuse(model.config, f"{frozen[0]} is frozen")
    return rows


def _read_rows(model: PreTrainedModel, layer: int, name: str, role: Role, counts: Counts) -> dict[str, QkRows]:
    """The rows of one projection's weight and bias."""
    module, kind = model.get_submodule(name), name.rpartition(".")[2]
    attention: nn.Module = model.get_submodule(name.rpartition(".")[0])
    if kind in HEAD_NORMS:
        raise _refuse(model.config, f"{kind} already bounds them, and the scale of a projection is lost in it")
    if type(attention).__name__ in QUERY_RULES or counts.blocks > 1:
        raise _refuse(model.config, f"{type(attention).__name__} orders or scales its heads in a way of its own")
    units = _units_of(attention, kind, role, counts)
    dim = int(isinstance(module, Conv1D))
    found = {}
    for own, parameter in module.named_parameters(recurse=False) if units else ():
        size = parameter.shape[dim if parameter.ndim > 1 else 0]
        assert size % len(units) == 0, f"{name}: {size} rows of {len(units)} units"
        heads, powers = (torch.tensor(each).repeat_interleave(size // len(units)) for each in zip(*units, strict=True))
        found[f"{name}.{own}"] = QkRows(layer, dim if parameter.ndim > 1 else 0, heads, powers.double())
    return found


def _units_of(attention: nn.Module, kind: str, role: Role, counts: Counts) -> Units:
    """The key head and the power of each of equally many rows of a projection; nothing for one that has neither queries nor
    keys."""
    # Where each head has its query beside its key, a config's number of key-value heads means nothing.
    q, kv = counts.q, counts.q if role.arrangement == "per_head" else counts.kv
    queries, keys = [(head // (q // kv), QUERY) for head in range(q)], [(head, KEY) for head in range(kv)]
    values = [(head, VALUE) for head in range(kv)]
    if (latent := getattr(attention, "qk_nope_head_dim", None)) is not None:
        rotary, value = int(vars(attention)["qk_rope_head_dim"]), int(vars(attention)["v_head_dim"])
        if kind in ("q_proj", "q_b_proj"):
            return [each for h in range(q) for each in [(h, QUERY)] * latent + [(h, QUERY_OF_SHARED)] * rotary]
        return [each for h in range(q) for each in [(h, KEY)] * latent + [(h, VALUE)] * value] * (kind == "kv_b_proj")
    match role.arrangement:
        case "heads" if role.kind == "column":
            return queries
        case "kv_heads":
            return keys if kind in ("k_proj", "key") else []
        case "qkv":
            return [*queries, *keys, *values]
        case "per_head" | "groups":
            size = q // kv
            return [each for h in range(kv) for each in [*queries[h * size : (h + 1) * size], keys[h], values[h]]]
    return []


def count_key_heads(rows: Mapping[str, QkRows]) -> list[int]:
    """Key heads of each layer of the whole model; 1 of a layer without attention."""
    counts = [1] * (1 + max(each.layer for each in rows.values()))
    for each in rows.values():
        counts[each.layer] = max(counts[each.layer], int(each.heads.max()) + 1)
    return counts


def _refuse(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(
        f"optim.qk_clip: attention logits of {config.model_type} models cannot be clipped: {reason}. Set it to null"
    )


class QkClip:
    """optim: has t above. rows: of all projections, by parameter; parts: all that this rank updates."""

    def __init__(
        self,
        optim: Optim,
        rows: Mapping[str, QkRows],
        parts: Sequence[ParameterPart],
        maxima: LogitMaxima,
        world: Communicator,
    ):
        assert optim.qk_clip is not None, "no limit (optim.qk_clip)"
        self._limit, self._maxima, self._world = optim.qk_clip, maxima, world
        self._parts = [(part, rows[part.name], _find_own(part, rows[part.name])) for part in parts if part.name in rows]

    def gather(self) -> None:
        """Make the maxima those of all ranks. Collective over the world."""
        all_reduce(self._maxima.values, self._world, "max", label="attention logits")

    def forget(self) -> None:
        """Begin a step's maxima anew."""
        self._maxima.values.fill_(-inf)

    def clip(self, shards: Iterable[FlatShard], skip: Tensor) -> None:
        """Scale the projections in these shards, which were updated, unless `skip`, a scalar on their device, is 1."""
        own, taken = set(shards), 1.0 - skip.double()
        largest = fetch(self._maxima.values, skip.device)
        factors = torch.where(largest > self._limit, self._limit / largest, 1.0) ** taken
        for part, rows, (heads, powers) in self._parts:
            if part.shard in own:
                scale = factors[rows.layer][heads] ** powers
                part.value.mul_(_expand(scale, part, rows.dim).to(part.value.dtype))


def _find_own(part: ParameterPart, rows: QkRows) -> tuple[Tensor, Tensor]:
    """Head and power of each of the part's local indices."""
    indices = torch.cat([torch.arange(*run) for run in part.layout.runs[rows.dim]])
    device = part.value.device
    return rows.heads[indices].to(device), rows.powers[indices].to(device)


def _expand(scale: Tensor, part: ParameterPart, dim: int) -> Tensor:
    """A number of each local index along `dim`, for the elements of the part: [n]."""
    low, high = part.layout.interval or (0, part.layout.numel_local)
    inner = part.layout.numel_local // part.layout.shape_local[0]  # elements of an index along dim 0
    first, last = low // inner, -(-high // inner)
    rows = scale[first:last].repeat_interleave(inner) if dim == 0 else scale.repeat(last - first)
    return rows[low - first * inner : high - first * inner]
