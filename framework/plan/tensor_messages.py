"""Messages of a layer over `tp`: hidden states that cross the borders of its regions, and what is summed within them.

Bytes that one of n ranks sends for each token in forward and backward, with D hidden features, e bytes of a value, max(e, 4) of a
sum, counted in units of 4 (n-1)/n, an all-reduce either way, or a gather and a reduce-scatter:

    region              D e                   attention, recurrent mixer, mlp, mixture, shared experts
    joined mixture      D e / 2               whole experts, tokens not divided: results are gathered, and gradients
    summed layer        N e                   N outputs that all ranks go on with within a region (x_proj of Mamba-1)
    shared rows         N e / 2               N outputs that ranks have alike (B, C, dt of Mamba-2): gradients are summed
    norm                G max(e, 4)           over features of several ranks; G groups of them, 1 but for a gated norm
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.mesh.token_layout import TokenLayout
from framework.model.experts import count_all_experts
from framework.model.units import Unit
from framework.parallel.tensor.find_regions import find_regions
from framework.parallel.tensor.partition import FEATURES, count_heads
from framework.parallel.tensor.split import NO_HEADS


@dataclass(frozen=True)
class TensorMessages:
    """A layer's regions, mixtures of whole experts, outputs of summed layers, shared rows, and groups of norms."""

    regions: int
    mixtures: int = 0
    summed: int = 0
    shared: int = 0
    normed: int = 0

    def sent(self, tokens: TokenLayout, width: int, itemsize: int) -> int:
        """Bytes that a rank sends for one microbatch, without recomputation. width: D."""
        joined = self.mixtures / 2 if tokens.num_parts == 1 else 0.0
        of_token = ((self.regions + joined) * width + self.summed + self.shared / 2) * itemsize + self.normed * max(
            itemsize, 4
        )
        return int(4 * (tokens.tp.size - 1) * tokens.sequences * tokens.context * of_token) // tokens.tp.size


# Messages of a layer that no rule of tensor parallelism knows: one each for attention and mlp.
USUAL = TensorMessages(2)


def find_tensor_messages(
    model: PreTrainedModel, units: Sequence[Unit], tp_plan: Mapping[str, str], tp: int, slices_experts: bool
) -> list[TensorMessages]:
    """The messages of each layer on ranks of `tp`; `USUAL` ones in a model that they do not split. tp_plan: the recipe's."""
    names = [name for unit in units for name in unit.modules]
    layers = [unit for unit in units if unit.is_layer]
    try:
        regions = find_regions(model, tp_plan, names, not slices_experts)
    except ModelError:
        return [USUAL] * len(layers)
    found = []
    for layer in layers:
        own = [each for each in regions if each.name.startswith(f"{layer.root}.")]
        summed = shared = normed = 0
        for region in own:
            has_heads = any(role.arrangement not in FEATURES for role in region.roles.values())
            counts = count_heads(model, region) if has_heads else NO_HEADS
            for name, role in region.roles.items():
                weight = getattr(model.get_submodule(name), "weight", None)
                if role.kind == "sum" and weight is not None:
                    summed += len(weight)
                elif role.kind == "column" and weight is not None and weight.ndim == 2:
                    segments = counts.count_whole(role.arrangement, tp)
                    shared += sum(counts.linear[role.arrangement][-segments:]) if segments else 0
                elif role.kind == "norm" and weight is not None and weight.ndim == 1:
                    groups = counts.kv if role.arrangement == "linear_value_heads" else 1
                    normed += groups * (groups % tp > 0)
        mixtures = 0 if slices_experts else len(count_all_experts(model.get_submodule(layer.root)))
        found.append(TensorMessages(len(own), mixtures, summed, shared, normed))
    return found
