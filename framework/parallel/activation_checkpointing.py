"""Keep a layer's input instead of its activations, and compute them again in backward (Chen et al. 2016).

    none         all activations are kept
    selective    the input, and outputs of the operations that the recipe names (Korthikanti et al. 2022, the other way round)
    full         the input
    sqrt         the input of every g-th layer, g = sqrt(layers): backward first computes a group's other inputs, then each layer

For L layers, h bytes of an input and a bytes of all that a layer computes, full has L h + a when backward begins, sqrt has
(L/g + g) h + a, and runs forward once more. A group's layers are not kept all at once, as Chen's are: that would be g a.

Our own wrapper around the layer's forward rather than Hugging Face's flag, whose versions disagree on whether a layer's hooks run
again in the recomputation. The layer's random state is restored, so dropout is the same both times, and so is a router's choice.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from framework.model.experts import count_all_experts
from framework.model.kept_outputs import ATTENTION, EXPERTS, KeepsOutputs, KeptOutputs, LayerCall, Policy
from framework.model.matmul import StackedMatmul
from framework.model.opaque import find_opaque_experts
from framework.torch_private import version_of

Unshard = Callable[[], AbstractContextManager[None]]


def group_size(num_layers: int) -> int:
    """Layers of a group of `sqrt`: the nearest to the root, where their number and their inputs are fewest together."""
    root = isqrt(max(num_layers, 1))
    return root + (num_layers > root * (root + 1))


def count_groups(num_layers: int) -> int:
    """Groups of so many layers; the last may be smaller."""
    return -(-num_layers // group_size(num_layers))


def checkpoint_layers(
    layers: Mapping[str, nn.Module],
    policies: Mapping[str, Policy],
    named: Sequence[str],
    operations: Mapping[nn.Module, Sequence[KeepsOutputs]],
    compiled: Container[nn.Module],
    unshard: Callable[[str], AbstractContextManager[None]],
    is_random: bool,
) -> None:
    """Make layers recompute in backward, each by its policy.

    layers: of a stage, by the names of their units, in order. named: `memory.kept_operations`. operations: of modules inside.
    compiled: has the layers that are. unshard: makes a unit's parameters readable meanwhile, for `sqrt`. is_random: layers take
    random numbers.
    """
    grouped = [name for name in layers if policies[name] == "sqrt"]
    chain = _Chain(group_size(len(grouped)))
    for name, layer in layers.items():
        if policies[name] == "none":
            continue
        # A compiled layer chooses within its graph what it keeps (`model/opaque_linear.py`).
        if policies[name] == "selective" and layer in compiled:
            if EXPERTS in named:
                _keep_within_experts(layer, operations)
            continue
        chosen = named if policies[name] == "selective" else ()
        # torch compiles nothing while a dispatch mode is there: a compiled layer finds its choices again, in the same graph.
        kept = KeptOutputs() if layer in compiled else _keep_outputs(layer, chosen, operations)
        forward = CheckpointedForward(layer.forward, kept, is_random)
        layer.forward = GroupedForward(forward, partial(unshard, name), chain) if name in grouped else forward


def _keep_outputs(
    layer: nn.Module, named: Sequence[str], operations: Mapping[nn.Module, Sequence[KeepsOutputs]]
) -> KeptOutputs:
    # A mixture's choice is always restored; elsewhere nothing need be caught unless an attention is kept.
    kept = KeptOutputs(named, catches=ATTENTION in named or bool(count_all_experts(layer)))
    for path, module in layer.named_modules():
        for operation in operations.get(module, ()):
            is_stacked = isinstance(operation, StackedMatmul)
            operation.keep_outputs(kept, EXPERTS if is_stacked else path.rpartition(".")[2])
    return kept


def _keep_within_experts(layer: nn.Module, operations: Mapping[nn.Module, Sequence[KeepsOutputs]]) -> None:
    """Have experts that dispatch, one operator of a compiled layer whose output is kept, keep no more than in eager mode."""
    for opaque in find_opaque_experts(layer):
        if opaque.operation == EXPERTS:
            kept = KeptOutputs([EXPERTS])
            for operation in operations.get(opaque.experts, ()):
                operation.keep_outputs(kept, EXPERTS)
            opaque.compute, opaque.keeps_input = CheckpointedForward(opaque.compute, kept, is_random=False), True


class CheckpointedForward:
    """A layer's forward that is computed again in backward. Bitwise the same result. is_random: it takes random numbers, so the
    generators' states are kept, 5 kB of the host for each microbatch."""

    def __init__(self, forward: Callable[..., Any], kept: KeptOutputs, is_random: bool) -> None:
        self.run, self.kept, self.is_random = forward, kept, is_random

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        return self.compute_twice(LayerCall(), self.run, *args, **kwargs)

    def compute_twice(self, call: LayerCall, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run now, and in backward. call: what the first is to keep for the second."""

        def passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return self.kept.forward(call), self.kept.recomputation(call)

        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.is_random, "context_fn": passes}
        return checkpoint(run, *args, **settings, **kwargs)


class GroupedForward:
    """A checkpointed forward whose input is computed again, too, from the input of the first layer of its group."""

    def __init__(self, forward: CheckpointedForward, unshard: Unshard, chain: "_Chain") -> None:
        self.forward, self.unshard, self.chain = forward, unshard, chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # Some families pass it by keyword. Everything else (masks, positions) is the same tensors for all layers.
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        run = partial(_run_on, self.forward.run, args[1:], kwargs)
        call, group = LayerCall(), self.chain.enter(hidden)
        random_state = _RandomState(hidden) if self.forward.is_random else None
        position = group.add(_Passage(self, call, run, random_state))
        with group.input_hooks(position):
            # The group lives as long as the graph of any of its layers.
            output = self.forward.compute_twice(call, partial(_run_in, group, run), hidden)
        self.chain.leave(_first(output))
        return output


def _run_on(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor) -> Any:
    return run(hidden, *args, **kwargs)


def _run_in(group: "_GroupCall", run: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    return run(hidden)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class _RandomState:
    """The state of the generators that a layer draws from, on the host and on the device of x."""

    def __init__(self, x: Tensor) -> None:
        self._host = torch.get_rng_state()
        self._device = (x.device, torch.cuda.get_rng_state(x.device)) if x.is_cuda else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which random numbers are those that the layer drew."""
        with torch.random.fork_rng([self._device[0]] if self._device else []):
            torch.set_rng_state(self._host)
            if self._device is not None:
                torch.cuda.set_rng_state(self._device[1], self._device[0])
            yield


@dataclass(frozen=True)
class _Passage:
    """One layer's part of a group's call. run: of hidden states alone."""

    layer: GroupedForward
    call: LayerCall
    run: Callable[[Tensor], Any]
    random_state: _RandomState | None

    def compute(self, hidden: Tensor) -> Tensor:
        """The layer's output, for the next layer's input alone: no graph."""
        restored = nullcontext() if self.random_state is None else self.random_state.restored()
        kept = self.layer.forward.kept.recomputation
        with torch.no_grad(), restored, self.layer.unshard(), kept(self.call):
            return _first(self.run(hidden))


@dataclass(eq=False)
class _GroupCall:
    """One microbatch's passage through a group. inputs: of its layers, by position: of the first, and, while backward is in the
    group, of those that it has not come to."""

    inputs: dict[int, Tensor]
    passages: list[_Passage] = field(default_factory=list)

    def add(self, passage: _Passage) -> int:
        """Returns the layer's position in the group."""
        self.passages.append(passage)
        return len(self.passages) - 1

    def input_hooks(self, position: int) -> AbstractContextManager[Any]:
        """A context in which what autograd keeps of a layer's input is a note where to find it; of the first it is the input."""
        if position == 0:
            return nullcontext()
        return saved_tensors_hooks(lambda _: position, self._take_input)

    def _take_input(self, position: int) -> Tensor:
        if position not in self.inputs:
            for each in range(position):
                self.inputs[each + 1] = self.passages[each].compute(self.inputs[each])
        return self.inputs.pop(position)


class _Chain:
    """The group that the stage's forward is in. size: layers of a group."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Weak, both: what is kept of a microbatch is kept by its graph.
        self._group: ref[_GroupCall] | None = None
        self._output: ref[Tensor] | None = None
        self._version = 0

    def enter(self, hidden: Tensor) -> _GroupCall:
        """The group that a layer belongs to: that of the layer before, or a new one where that is complete, or where the input is
        not what the layer before has returned (another microbatch, or a family that computes in between)."""
        before = None if self._output is None else self._output()
        group = None if self._group is None else self._group()
        follows = hidden is before and version_of(hidden) == self._version
        if group is None or not follows or len(group.passages) == self._size:
            group = _GroupCall({0: hidden.detach()})
            self._group = ref(group)
        return group

    def leave(self, output: Tensor) -> None:
        """Note what the layer that has been entered last returns."""
        self._output, self._version = ref(output), version_of(output)
