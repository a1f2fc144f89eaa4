"""Pipeline stages of a model: a range of its layers, the first stage with the embedding, the last with the head.

A stage is the unmodified Hugging Face model, called as always, so masks, positions and rotary tables are computed on every stage;
only hidden states come from the stage before. Modules of other stages are replaced on meta, before anything has memory:

    layer       returns its input; the list keeps its length, so every layer keeps its index
    embedding   returns zeros of the right shape; what the model computes from them before its layers is not used
    head        returns logits of an empty vocabulary

Received hidden states replace the input of the first own layer. So scalings, position embeddings and norms between embedding and
layers act once, on the first stage. The output of the last own layer is what the stage returns; the model's code after it runs on
zeros.

Shapes: B sequences, T tokens of each (with sequence parallelism those of this rank), D the hidden size, V the vocabulary size.
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
from framework.model.initial import seed_for, seed_rng
from framework.model.routers import Routers
from framework.model.units import Unit

# By an attribute of a module of the layer: values, beside hidden states, that a layer may take from the one before.
FOLLOWERS: Mapping[str, str] = MappingProxyType({"skip_topk": "the keys that an indexer has chosen"})


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
    of another stage is on both stages, under the same name.
    """
    kept = [unit for unit in units if bounds.owns(unit) or not unit.is_layer]
    return [replace(unit, parameters=_own_parameters(unit, units, ties, bounds)) for unit in kept]


def _own_parameters(
    unit: Unit, units: Sequence[Unit], ties: Mapping[str, tuple[str, ...]], bounds: StageBounds
) -> tuple[str, ...]:
    if not bounds.owns(unit):
        return ()
    # A parameter of one name alone is tied to nothing.
    elsewhere = [name for other in units if not bounds.owns(other) for name in other.parameters if len(ties[name]) > 1]
    tied = [name for name in elsewhere if any(_holder(alias) in unit.modules for alias in ties[name])]
    return (*unit.parameters, *tied)


def find_shared(units: Sequence[Unit], ties: Mapping[str, tuple[str, ...]], bounds: StageBounds) -> set[str]:
    """Names of the stage's parameters that another stage holds as well: tied ones, whose gradients are summed over both."""
    elsewhere = {module for unit in units if not bounds.owns(unit) for module in unit.modules}
    own = {name for unit in own_units(units, ties, bounds) for name in unit.parameters}
    return {name for name in own if any(_holder(alias) in elsewhere for alias in ties[name])}


def own_ties(model: nn.Module, ties: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The ties restricted to names that the stage's model has. A parameter keeps its key, its first name in the whole model."""
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = {name: tuple(alias for alias in aliases if alias in there) for name, aliases in ties.items()}
    return {name: aliases for name, aliases in kept.items() if aliases}


def copy_stage(whole: PreTrainedModel, units: Sequence[Unit], bounds: StageBounds, num_outputs: int) -> PreTrainedModel:
    """A copy of a model on meta for one stage, without the layers of other stages; the whole model stays as it is.

    Embedding, final norm and head are copied whole, with their ties, whoever owns them: tensor parallelism asks for their
    shapes, and `hollow_out` replaces them afterwards. With one stage it is a plain deep copy. Nothing is allocated.

    units: of the whole model. num_outputs: of its layers (`probe.find_layer_outputs`).
    """
    # deepcopy takes what its memo has for an object's id instead of copying it: a layer that is not needed costs nothing.
    memo: dict[int, Any] = {
        id(whole.get_submodule(unit.root)): PassThrough(num_outputs, whole.get_submodule(unit.root))
        for unit in units
        if unit.is_layer and not bounds.owns(unit)
    }
    return deepcopy(whole, memo)


class StageModel:
    """A hollowed-out model that takes hidden states from the stage before and returns its own. With one stage it is the model.

    units: those that the stage runs. seed_mask: exclusive-or'd into the seeds of its layers, on a rank whose layers hold other
    tokens than those of the other ranks. routers: the model's, if there is a load-balancing loss whose sums are passed on.
    is_random: its layers take random numbers; else they are not seeded one by one. streams: between a token's dims and its
    features (`probe.find_streams`); between stages they are features, too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        units: Sequence[Unit],
        bounds: StageBounds,
        seed_mask: int = 0,
        routers: Routers | None = None,
        is_random: bool = True,
        streams: tuple[int, ...] = (),
    ):
        self.model, self.bounds, self.routers, self._streams = model, bounds, routers, streams
        self._received: Tensor | None = None
        self._leaving: Tensor | None = None
        self._seed: tuple[int | str, ...] | None = None
        self._shape = torch.Size()
        model.register_forward_pre_hook(self._note_shape, with_kwargs=True)
        self._stand_ins = [module for module in model.modules() if isinstance(module, StandIn)]
        self._layers = layers = [unit.root for unit in units if unit.is_layer and bounds.owns(unit)]
        for unit in units:
            if is_random and unit.is_layer and bounds.owns(unit):
                model.get_submodule(unit.root).register_forward_pre_hook(partial(self._reseed, unit.name, seed_mask))
        if not bounds.is_first:
            model.get_submodule(layers[0]).register_forward_pre_hook(self._inject, with_kwargs=True)
        if not bounds.is_last:
            model.get_submodule(layers[-1]).register_forward_hook(self._take)
            behind = _following_layer(layers[-1])
            model.get_submodule(behind).register_forward_pre_hook(self._blank, with_kwargs=True)

    def __call__(
        self, received: tuple[Tensor, ...], seed: tuple[int | str, ...] | None = None, **inputs: Any
    ) -> tuple[Any, ...]:
        """Run the stage on one microbatch.

        received: () on the first stage, else hidden states [B, T, streams D] in compute dtype, and with a load-balancing loss the
        routers' sums [2E + 1] (`LoadBalancingLoss`). inputs: of the model, at least input_ids [B, T] int64, whole on every stage.
        Returns the same for the next stage; on the last one the model's output with logits [B, T, V] takes the hidden states'
        place. Communicates only inside tensor-parallel layers.

        seed: random numbers of a layer are a function of it and of the layer's name, however the model is split into stages.
        None: nothing is seeded, which leaves the RNG streams as they are.
        """
        self._received, self._leaving, self._seed = received[0] if received else None, None, seed
        for stand_in in self._stand_ins:
            stand_in.move(inputs["input_ids"].device)
        self._reseed("embedding", 0)
        if self.routers is not None:
            self.routers.start()
        output = self.model(**inputs)
        leaving, self._received, self._leaving = self._leaving, None, None
        if leaving is not None and self._streams:
            leaving = leaving.flatten(2)
        sums = () if self.routers is None else (self.routers.end(*received[1:]),)
        return output if self.bounds.is_last else leaving, *sums

    def _reseed(self, unit: str, mask: int, *_: Any) -> None:
        if self._seed is not None:
            seed_rng(seed_for(*self._seed, unit) ^ mask)

    def _note_shape(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # As the model gets it, which may be all tokens where this rank has some.
        self._shape = kwargs["input_ids"].shape

    # Hooks on layers, because a layer's input and output are all that every family's code agrees on.

    def _inject(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        received = self._received
        if received is not None and self._streams:
            received = received.unflatten(-1, (*self._streams, -1))
        return _replace_input(args, kwargs, received)

    def _take(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._leaving = output[0] if isinstance(output, tuple | list) else output

    def _blank(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Zeros for the model's code after the own layers, whose result is not used: of all tokens, as the final norm and the
        head may ask for, yet without memory."""
        assert self._leaving is not None, "a layer runs before those in front of it"
        zeros = self._leaving.new_zeros(()).expand(*self._shape, *self._leaving.shape[2:])
        return _replace_input(args, kwargs, zeros)


def _following_layer(path: str) -> str:
    """The path of the layer after the one at `path`."""
    layers, _, index = path.rpartition(".")
    return f"{layers}.{int(index) + 1}"


def _replace_input(args: tuple[Any, ...], kwargs: dict[str, Any], hidden_states: Tensor | None) -> tuple[Any, Any]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": hidden_states}
    return (hidden_states, *args[1:]), kwargs


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
    """Stand-in for another stage's module with a weight: [0] in `dtype`, where the inputs are. Families ask for its device
    (llama4 sends its tokens to that of its embedding) and its dtype (mamba has hidden states cast to that of its head)."""

    def __init__(self, width: int | None, dtype: torch.dtype):
        super().__init__()
        self.width, self.dtype = width, dtype
        self.weight = torch.empty(0, dtype=dtype, device="meta")

    def move(self, device: torch.device) -> None:
        """Move `weight` to the device."""
        if self.weight.device != device:
            self.weight = torch.empty(0, dtype=self.dtype, device=device)


class Zeros(StandIn):
    """Stand-in for another stage's embedding: returns zeros [B, T, width] in `dtype` for an input [B, T, ...]."""

    width: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # opt's position embedding takes the attention mask first, which is None here, or of another shape.
        x = x if kwargs.get("position_ids") is None else kwargs["position_ids"]
        return torch.zeros(*x.shape[:2], self.width, dtype=self.dtype, device=x.device)


class Resized(StandIn):
    """Stand-in for another stage's linear layer or norm: returns its input [..., D], or zeros [..., width] of another width.

    width: None for a norm; 0 for the head, whose logits then take no memory. weight: [0], of the dtype that models cast to.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.width is None or self.width == x.shape[-1]:
            return x
        return x.new_zeros(*x.shape[:-1], self.width)


def hollow_out(model: PreTrainedModel, units: Sequence[Unit], bounds: StageBounds, dtype: torch.dtype) -> None:
    """Replace, in place, what a copy for one stage still has of others: modules with parameters of the embedding and the head.

    units: the whole model's. dtype: of hidden states.
    """
    head = model.get_output_embeddings()
    for path in (path for unit in units if not unit.is_layer and not bounds.owns(unit) for path in unit.modules):
        module = model.get_submodule(path)
        if any(True for _ in module.parameters(recurse=False)):
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = _stand_in_for(module, module is head, dtype)


def _stand_in_for(module: nn.Module, is_head: bool, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Embedding) and not is_head:
        return Zeros(module.embedding_dim, dtype)
    return Resized(0 if is_head else getattr(module, "out_features", None), dtype)


def _holder(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def refuse_shared_layers(config: PretrainedConfig, units: Sequence[Unit], ties: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ModelError where layers share weights (zamba's attention), which stages would have to hold together.

    units: of the whole model; ties: all names of each parameter."""
    layers = {unit.root: unit.name for unit in units if unit.is_layer}
    for names in ties.values():
        if len(names) == 1:
            continue
        sharing = {layer for root, layer in layers.items() for name in names if name.startswith(f"{root}.")}
        if len(sharing) > 1:
            raise refuse_split(config, f"{' and '.join(sorted(sharing))} share {names[0]}")


def refuse_following_starts(
    config: PretrainedConfig, whole: nn.Module, units: Sequence[Unit], starts: Sequence[int]
) -> None:
    """Raise ModelError where a stage begins with a layer that reads what the layer before it has chosen: between stages hidden
    states travel alone. starts: first layers of the stages behind the first."""
    layers = [unit for unit in units if unit.is_layer]
    following = {
        index: word
        for index, unit in enumerate(layers)
        for word in FOLLOWERS
        if any(getattr(whole.get_submodule(path), word, False) for path in unit.modules)
    }
    if found := [index for index in starts if index in following]:
        legal = [index for index in range(1, len(layers)) if index not in following]
        taken = FOLLOWERS[following[found[0]]]
        raise ModelError(
            f"{config.model_type}: a pipeline stage cannot begin at layer {found[0]}, which takes {taken}"
            f" from the layer before it: set pipeline.layers so that stages begin at any of {legal}"
        )


def refuse_split(config: PretrainedConfig, reason: str) -> ModelError:
    """The error for a family that cannot be cut into stages."""
    return ModelError(f"{config.model_type} models cannot be cut into pipeline stages: {reason}. Use parallel.pp=1")
