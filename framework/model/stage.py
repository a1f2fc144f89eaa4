"""Pipeline stages of a model: a range of its layers, the first stage with the embedding, the last with the head.

A stage is the unmodified Hugging Face model, called as always, so masks, positions and rotary tables are computed on every stage;
from the stage before come hidden states, and what else layers take from in front of the border (`borders.py`). Modules of other
stages are replaced on meta, before anything has memory:

    layer       returns its input; the list keeps its length, so every layer keeps its index
    embedding   returns zeros of the right shape; what the model computes from them before its layers is not used
    head        returns logits of an empty vocabulary

Received values replace the arguments of own layers. So scalings, position embeddings and norms between embedding and layers act
once, on the first stage. The arguments of the layers behind its own are what the stage returns; the model's code after them runs
on zeros.

Shapes: B sequences, T tokens of each (with sequence parallelism those of this rank), W the width of a border's message, V the
vocabulary size.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.borders import Border, Path, pack, read, unpack, write
from framework.model.initial import seed_for, seed_rng
from framework.model.routers import Routers
from framework.model.units import Unit

# Keyed by an attribute of a module of the layer: values, beside hidden states, that a layer may take from the one before.
FOLLOWERS: Mapping[str, str] = MappingProxyType({"skip_topk": "the keys that an indexer has chosen"})


# The values of a border that one layer takes: (number of the value, its place in the arguments).
Places = Sequence[tuple[int, Path]]


@dataclass(frozen=True)
class StageBounds:
    """Stage `index` of `count`, with the layers [start, stop)."""

    index: int
    count: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def owns(self, unit: Unit) -> bool:
        """Whether the unit's parameters are this stage's."""
        if unit.is_layer:
            return self.start <= int(unit.name.removeprefix("layers.")) < self.stop
        return self.is_first if unit.name == "embedding" else self.is_last


def split_stages(layers: Sequence[int]) -> list[StageBounds]:
    """Bounds of consecutive stages with these numbers of layers."""
    edges = [sum(layers[:index]) for index in range(len(layers) + 1)]
    return [StageBounds(index, len(layers), start, stop) for index, (start, stop) in enumerate(pairwise(edges))]


def own_units(units: Sequence[Unit], ties: Mapping[str, tuple[str, ...]], bounds: StageBounds) -> list[Unit]:
    """The units that the stage runs, in order, with the parameters that it holds.

    Embedding and head run on every stage, without parameters where they are another stage's. A parameter that is tied to a unit
    of another stage is on both stages, under the same name, in the first of the stage's units that has it.
    """
    elsewhere = [name for unit in units if not bounds.owns(unit) for name in unit.parameters if len(ties[name]) > 1]
    kept = []
    for unit in (unit for unit in units if bounds.owns(unit) or not unit.is_layer):
        tied = [name for name in elsewhere if bounds.owns(unit) and _meets(unit, ties[name])]
        elsewhere = [name for name in elsewhere if name not in tied]
        kept.append(replace(unit, parameters=(*unit.parameters, *tied) if bounds.owns(unit) else ()))
    return kept


def find_shared(units: Sequence[Unit], ties: Mapping[str, tuple[str, ...]], bounds: StageBounds) -> dict[str, str]:
    """The stage's parameters that other stages hold as well, tied ones, each with the axis over which their gradients are summed:
    `embedding` where only the first and the last stage hold it, else `pp`."""
    elsewhere = [unit for unit in units if not bounds.owns(unit)]
    own = [name for unit in own_units(units, ties, bounds) for name in unit.parameters]
    shared = [name for name in own if any(_meets(unit, ties[name]) for unit in elsewhere)]
    return {name: "pp" if is_of_layers(units, ties[name]) else "embedding" for name in shared}


def is_of_layers(units: Sequence[Unit], names: Sequence[str]) -> bool:
    """Whether several layers have a parameter of these names, as zamba's have one attention."""
    return sum(unit.is_layer and _meets(unit, names) for unit in units) > 1


def _meets(unit: Unit, names: Sequence[str]) -> bool:
    return any(name.rpartition(".")[0] in unit.modules for name in names)


def own_ties(model: nn.Module, ties: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The ties restricted to names that the stage's model has. A parameter keeps its key, its first name in the whole model."""
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = {name: tuple(alias for alias in aliases if alias in there) for name, aliases in ties.items()}
    return {name: aliases for name, aliases in kept.items() if aliases}


def copy_stage(whole: PreTrainedModel, units: Sequence[Unit], bounds: StageBounds, num_outputs: int) -> PreTrainedModel:
    """A copy of a model on meta for one stage, without the layers of other stages; the whole model stays as it is.

    Embedding, final norm and head are copied whole, with their ties, whoever owns them: tensor parallelism asks for their
    shapes, and `hollow_out` replaces them afterwards. With one stage it is a plain deep copy. Nothing is allocated.

    units: of the whole model. num_outputs: of its layers (`probe.find_layer_calls`).
    """
    # deepcopy takes what its memo has for an object's id instead of copying it: a layer that is not needed costs nothing.
    memo: dict[int, Any] = {
        id(whole.get_submodule(unit.root)): PassThrough(num_outputs, whole.get_submodule(unit.root))
        for unit in units
        if unit.is_layer and not bounds.owns(unit)
    }
    return deepcopy(whole, memo)


class StageModel:
    """A hollowed-out model that takes values from the stage before and returns those of the next. With one stage it is the model.

    units: those that the stage runs. received, sent: the borders in front of it and behind it, empty at the ends. seed_mask:
    exclusive-or'd into the seeds of its layers, on a rank whose layers hold other tokens than those of the other ranks. routers:
    the model's, if there is a load-balancing loss whose sums are passed on. is_random: its layers take random numbers; else they
    are not seeded one by one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        units: Sequence[Unit],
        bounds: StageBounds,
        received: Border = (),
        sent: Border = (),
        seed_mask: int = 0,
        routers: Routers | None = None,
        is_random: bool = True,
    ):
        self.model, self.bounds, self.routers, self._received, self._sent = model, bounds, routers, received, sent
        self._arrived: list[Tensor] = []
        self._leaving: dict[int, Tensor] = {}
        self._seed: tuple[int | str, ...] | None = None
        self._shape = torch.Size()
        model.register_forward_pre_hook(self._note_shape, with_kwargs=True)
        self._stand_ins = [module for module in model.modules() if isinstance(module, StandIn)]
        layers = {unit.name: unit.root for unit in units if unit.is_layer and bounds.owns(unit)}
        for name, layer in layers.items() if is_random else ():
            model.get_submodule(layer).register_forward_pre_hook(partial(self._reseed, name, seed_mask))
        if not (received or sent):
            return
        path = next(iter(layers.values())).rpartition(".")[0]
        for index, places in _by_layer(received, sent, bounds.stop).items():
            module = model.get_submodule(f"{path}.{index}")
            module.register_forward_pre_hook(partial(self._hand_on, *places), with_kwargs=True)

    def __call__(
        self, received: tuple[Tensor, ...], seed: tuple[int | str, ...] | None = None, **inputs: Any
    ) -> tuple[Any, ...]:
        """Run the stage on one microbatch.

        received: () on the first stage, else the message of the border [B, T, W], and with a load-balancing loss the routers'
        sums [2E + 1] (`LoadBalancingLoss`). inputs: of the model, at least input_ids [B, T] int64, whole on every stage.
        Returns the same for the next stage; on the last one the model's output with logits [B, T, V] takes the message's
        place. Communicates only inside tensor-parallel layers.

        seed: random numbers of a layer are a function of it and of the layer's name, however the model is split into stages.
        None: nothing is seeded, which leaves the RNG streams as they are.
        """
        self._arrived = unpack(self._received, received[0]) if self._received else []
        self._leaving, self._seed = {}, seed
        for stand_in in self._stand_ins:
            stand_in.move(inputs["input_ids"].device)
        self._reseed("embedding", 0)
        if self.routers is not None:
            self.routers.start()
        output = self.model(**inputs)
        leaving, self._arrived, self._leaving = self._leaving, [], {}
        sums = () if self.routers is None else (self.routers.end(*received[1:]),)
        return pack(self._sent, [leaving[index] for index in sorted(leaving)]) if self._sent else output, *sums

    def _reseed(self, unit: str, mask: int, *_: Any) -> None:
        if self._seed is not None:
            seed_rng(seed_for(*self._seed, unit) ^ mask)

    def _note_shape(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The shape that the model gets: maybe all tokens, where this rank holds some.
        self._shape = kwargs["input_ids"].shape

    def _hand_on(
        self, taken: Places, given: Places, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """A hook of layers, because a layer's arguments are all that every family's code agrees on: put received values in their
        places, `taken`, and take those that leave from theirs, `given`."""
        both: Any = args, kwargs
        for index, path in taken:
            both = write(both, path, self._arrived[index])
        for index, path in given:
            self._leaving[index] = read(both, path)
            if index == 0:
                # The result of the model's code behind is not used: of all tokens, as the final norm and the head may ask for.
                both = write(both, path, self._sent[0].blank(self._leaving[0], self._shape))
        return both


def _by_layer(received: Border, sent: Border, stop: int) -> dict[int, tuple[Places, Places]]:
    """Places by layer: of values that the stage has received, and of those that leave, which are found among the arguments of the
    first layer behind `stop` that takes them."""
    taken = [(layer, index, path) for index, value in enumerate(received) for layer, path in value.places]
    given = [(value.places[0][0], index, value.places[0][1]) for index, value in enumerate(sent)]
    assert all(layer >= stop for layer, _, _ in given), f"layers from {stop} on take {given}"
    layers = sorted({layer for layer, _, _ in (*taken, *given)})
    return {
        each: ([(i, p) for at, i, p in taken if at == each], [(i, p) for at, i, p in given if at == each])
        for each in layers
    }


class PassThrough(nn.Module):
    """Stand-in for another stage's layer: returns its input [B, T, D]; of several outputs None for the others.

    num_outputs: in a tuple; 0: the layer returns a tensor. layer: whose words and numbers a model may read (nemotron_h asks each
    layer for its kind, by which it chooses a mask).
    """

    def __init__(self, num_outputs: int, layer: nn.Module | None = None):
        super().__init__()
        self.num_outputs = num_outputs
        vars(self).update({name: each for name, each in _words(layer).items() if not hasattr(self, name)})

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        return (hidden_states, *[None] * (self.num_outputs - 1)) if self.num_outputs else hidden_states


def _words(layer: nn.Module | None) -> dict[str, str | int | float]:
    """Words and numbers that a layer, or its class, holds as attributes."""
    classes = [each for each in type(layer).__mro__ if not issubclass(nn.Module, each)]
    names = [*(vars(layer) if layer is not None else ()), *(name for each in classes for name in vars(each))]
    found = {name: getattr(layer, name) for name in names if not name.startswith("__")}
    return {name: each for name, each in found.items() if isinstance(each, str | int | float)}


class StandIn(nn.Module):
    """Stand-in for parameters of another stage: zeros in their shapes without memory, in `dtype`, where the inputs are.

    Families ask for the device of a weight (llama4 sends its tokens to that of its embedding), its dtype (mamba has hidden states
    cast to that of its head) or a row of it (gemma 4 reads that of the padding token). of: the module whose code goes on with
    them; None: this one's.
    """

    def __init__(self, replaced: nn.Module, dtype: torch.dtype, of: nn.Module | None = None):
        super().__init__()
        self._of, self._device = (self if of is None else of,), torch.device("cpu")
        self._zeros = {name: (each.shape, dtype) for name, each in replaced.named_parameters(recurse=False)}
        for name in () if of is None else self._zeros:
            delattr(of, name)
        self.move(torch.device("meta"))

    def move(self, device: torch.device) -> None:
        """Have the zeros on the device."""
        if self._device != device:
            self._device = device
            zeros = {
                name: torch.zeros((), dtype=dtype, device=device).expand(shape)
                for name, (shape, dtype) in self._zeros.items()
            }
            vars(self._of[0]).update(zeros)


class Zeros(StandIn):
    """Stand-in for another stage's embedding: returns zeros [B, T, width] in `dtype` for an input [B, T, ...]."""

    def __init__(self, replaced: nn.Embedding, dtype: torch.dtype):
        super().__init__(replaced, dtype)
        self.width, self.dtype = replaced.embedding_dim, dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # opt's position embedding takes the attention mask first, which is None here, or of another shape.
        x = x if kwargs.get("position_ids") is None else kwargs["position_ids"]
        return torch.zeros(*x.shape[:2], self.width, dtype=self.dtype, device=x.device)


class Resized(StandIn):
    """Stand-in for another stage's linear layer or norm: returns its input [..., D], or zeros [..., width] of another width.

    width: None for a norm; 0 for the head, whose logits then take no memory.
    """

    def __init__(self, replaced: nn.Module, dtype: torch.dtype, width: int | None):
        super().__init__(replaced, dtype)
        self.width = width

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.width is None or self.width == x.shape[-1]:
            return x
        return x.new_zeros(*x.shape[:-1], self.width)


def hollow_out(model: PreTrainedModel, units: Sequence[Unit], bounds: StageBounds, dtype: torch.dtype) -> None:
    """Replace, in place, what a copy for one stage still has of others: modules with parameters of the embedding and the head.

    units: the whole model's. dtype: of hidden states.
    """
    head, layers = model.get_output_embeddings(), next(unit.root for unit in units if unit.is_layer)
    for path in (path for unit in units if not unit.is_layer and not bounds.owns(unit) for path in unit.modules):
        module = model.get_submodule(path)
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if not path or layers.startswith(f"{path}."):
            module.stand_in = StandIn(module, dtype, of=module)  # zaya scales its embedding in front of its layers
            continue
        model.set_submodule(path, _stand_in_for(module, module is head, dtype))


def _stand_in_for(module: nn.Module, is_head: bool, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Embedding) and not is_head:
        return Zeros(module, dtype)
    return Resized(module, dtype, 0 if is_head else getattr(module, "out_features", None))


def refuse_shared_layers(
    config: PretrainedConfig,
    units: Sequence[Unit],
    ties: Mapping[str, tuple[str, ...]],
    stages: Sequence[StageBounds],
) -> None:
    """Raise ModelError where some stages hold weights that layers share (zamba's attention), and others do not: their gradients
    are summed over the whole pipeline.

    units: of the whole model; ties: all names of each parameter."""
    for names in (names for names in ties.values() if len(names) > 1 and is_of_layers(units, names)):
        holding = [int(unit.name.removeprefix("layers.")) for unit in units if unit.is_layer and _meets(unit, names)]
        counts = [sum(each.start <= layer < each.stop for layer in holding) for each in stages]
        if 0 in counts and sum(count > 0 for count in counts) > 1:
            raise ModelError(
                f"{config.model_type}: layers {holding} share {names[0]}, and of the {len(stages)} stages of the pipeline some"
                f" have {counts} of them: every stage needs one, or one stage all. Set pipeline.layers so, or lower parallel.pp"
            )


def find_following(whole: nn.Module, units: Sequence[Unit]) -> dict[int, str]:
    """Layers that read what the layer before them has chosen, each with its word of FOLLOWERS."""
    return {
        index: word
        for index, unit in enumerate(unit for unit in units if unit.is_layer)
        for word in FOLLOWERS
        if any(getattr(whole.get_submodule(path), word, False) for path in unit.modules)
    }


def refuse_following_starts(
    config: PretrainedConfig, whole: nn.Module, units: Sequence[Unit], starts: Sequence[int]
) -> None:
    """Raise ModelError where a stage begins with a layer that reads what the layer before it has chosen: between stages hidden
    states travel alone. starts: first layers of the stages behind the first."""
    following = find_following(whole, units)
    if found := [index for index in starts if index in following]:
        legal = [index for index in range(1, sum(unit.is_layer for unit in units)) if index not in following]
        taken = FOLLOWERS[following[found[0]]]
        raise ModelError(
            f"{config.model_type}: a pipeline stage cannot begin at layer {found[0]}, which takes {taken}"
            f" from the layer before it: set pipeline.layers so that stages begin at any of {legal}"
        )


def refuse_sliced_values(config: PretrainedConfig, tp: int) -> None:
    """Raise ModelError for tensor parallelism beside a pipeline whose messages have more than hidden states, `config`'s."""
    if tp > 1:
        raise ModelError(
            f"parallel.pp with parallel.tp={tp}: layers of {config.model_type} models take more than hidden states from earlier"
            " ones (keys, embeddings of ids), and a border does not know a rank's part of that. Use parallel.tp=1 or"
            " parallel.pp=1"
        )


def refuse_split(config: PretrainedConfig, reason: str) -> ModelError:
    """The error for a family that cannot be cut into stages."""
    return ModelError(f"{config.model_type} models cannot be cut into pipeline stages: {reason}. Use parallel.pp=1")
