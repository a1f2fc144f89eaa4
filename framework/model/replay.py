"""Replay: a model's calls of its modules, without the code between them, where that code is shown not to depend on data.

Around its layers a Hugging Face model computes positions, rotary tables and masks, in each forward anew and from shapes alone; on
GPUs its mask code asks the device a question there, and the host waits. What it comes to for one shape of the tokens is a chain:

    embedding(tokens) -> layer(x, *constants) -> ... -> layer(x, *constants) -> norm(x) -> head(x)

The first forward of a shape runs the model as it is, and notes what each of these modules is given and gives. Then the model's
forward runs once more with tensors that have a shape and no values (torch's FakeTensor) in the place of the tokens and of all
that these modules give. Code that reads a value raises an error there, and what is computed from such a tensor has no values
either. So what the modules are given with values depends neither on data nor on parameters, which only these modules hold. The
forward is replayed from then on if

    every module gets the output of the one before, untouched, and nothing else without values;
    everything else that it gets is a constant, equal to what it was given in the first forward;
    the code has changed no module and no buffer, and has drawn no random number;
    the result is the last module's output.

Otherwise, and for inputs with other tensors than tokens (packed positions), the model runs as it is. A replay calls the same
modules with the same values, hooks included: it is the same in every bit. Modules between are not called, so they must have no
hooks.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from framework.model.load import FORWARD_ERRORS

# Values that no code can change.
CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)
# One is of training, one of validation. Whoever has more shapes gains little, and each costs a forward without values.
MOST_CHAINS = 8


@dataclass(frozen=True)
class Output:
    """What a module of the chain gives: a tensor, or a tuple that begins with one."""

    value: Tensor
    rest: tuple[Any, ...] | None

    @classmethod
    def of(cls, output: Any) -> "Output | None":
        """None for an output of another kind."""
        first, rest = (output[0], output[1:]) if type(output) is tuple and output else (output, None)
        if not isinstance(first, Tensor) or any(not isinstance(each, Tensor | None) for each in rest or ()):
            return None
        return cls(first, rest)


@dataclass(frozen=True)
class Given:
    """One call of a module: what it was given, and what it gave. versions: of the arguments' tensors at the call, by id."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: dict[int, int]
    output: Output | None


@dataclass(frozen=True)
class Call:
    """One call of the chain. args, kwargs: constants, but for what stands at `data`, a position or a name, which is replaced by
    the tensor that flows."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    data: int | str
    takes_first: bool

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.data, int):
            output = self.module(*self.args[: self.data], x, *self.args[self.data + 1 :], **self.kwargs)
        else:
            output = self.module(*self.args, **(self.kwargs | {self.data: x}))
        return output[0] if self.takes_first else output

    @property
    def constants(self) -> Iterator[Any]:
        """What it is given beside the data, in the order of arguments."""
        yield from (each for index, each in enumerate(self.args) if index != self.data)
        yield from (each for name, each in self.kwargs.items() if name != self.data)


@dataclass(frozen=True)
class Chain:
    """The calls of a forward. begins_with: what the first module gets where that is not the tokens: zeros without memory, which a
    hook of its own replaces. tensors: the constants, each with its version, which nobody may write to."""

    calls: tuple[Call, ...]
    begins_with: Tensor | None
    tensors: tuple[tuple[Tensor, int], ...]

    @property
    def is_intact(self) -> bool:
        """Whether its constants are what they were."""
        return all(tensor._version == version for tensor, version in self.tensors)

    def __call__(self, tokens: Tensor) -> Tensor:
        x = tokens if self.begins_with is None else self.begins_with
        for call in self.calls:
            x = call(x)
        return x


class _NotReplayed(Exception):
    """Why a forward is not a chain of calls."""


class ReplayedForward:
    """The forward of a model, or of a pipeline stage of one, which replays what it can.

    parts: the modules of the chain by path, outermost ones only: layers, and what holds parameters besides. begins: whether the
    chain begins with the tokens; else its first module is given hidden states by a hook of its own. ends: whether the model's
    output is used; else the last module's is, by a hook. unused: paths of modules that may be left out although they have hooks.
    refusals: by shape and mode, why a forward is not replayed.
    """

    def __init__(
        self, model: PreTrainedModel, parts: Mapping[str, nn.Module], begins: bool, ends: bool, unused: Sequence[str]
    ):
        self._model, self._parts, self._begins, self._ends = model, parts, begins, ends
        self._forward: Callable[..., Any] = model.forward
        self._between = [
            module
            for path, module in model.named_modules()
            if path and path not in unused and not _is_within(path, parts)
        ]
        self._chains: dict[Any, Chain | None] = {}
        self.refusals: dict[Any, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids")
        others = {name: value for name, value in kwargs.items() if name != "input_ids"}
        if args or tokens is None or tokens.is_meta or not all(map(_is_plain, others.values())):
            return self._forward(*args, **kwargs)
        key = (tokens.shape, self._model.training, torch.is_grad_enabled(), *others.items())
        if key not in self._chains and len(self._chains) < MOST_CHAINS:
            return self._observe(key, tokens, others)
        chain = self._chains.get(key)
        if chain is None or not chain.is_intact or any(map(_has_hooks, self._between)):
            return self._forward(**kwargs)
        value = chain(tokens)
        return CausalLMOutput(logits=value) if self._ends else None

    @property
    def constants(self) -> list[Tensor]:
        """What is held for replays."""
        return [tensor for chain in self._chains.values() if chain is not None for tensor, _ in chain.tensors]

    def _observe(self, key: Any, tokens: Tensor, others: dict[str, Any]) -> Any:
        """Run the model as it is, and find out whether later forwards need it."""
        observed: list[Given] = []
        with _noting(self._parts.values(), observed):
            output = self._forward(input_ids=tokens, **others)
        try:
            self._chains[key] = self._capture(tokens, others, observed)
        except _NotReplayed as reason:
            self._chains[key], self.refusals[key] = None, str(reason)
        return output

    def _capture(self, tokens: Tensor, others: dict[str, Any], observed: Sequence[Given]) -> Chain:
        """The chain of calls. Raises _NotReplayed where the forward is none."""
        if any(map(_has_hooks, self._between)):
            raise _NotReplayed("a module that would not be called has hooks")
        recording, before = _Recording(tokens, observed, self._begins), _state_of(self._model)
        try:
            with _kept_generators(), recording.stubs(self._model, self._parts), _Strict():
                output = self._forward(input_ids=recording.tokens, **others)
        except (StopIteration, *FORWARD_ERRORS) as error:
            raise _NotReplayed(f"its code wants values: {error}") from error
        if _state_of(self._model) != before:
            raise _NotReplayed("its code changes the model's state")
        if len(recording.calls) != len(observed):
            raise _NotReplayed("its calls depend on values")
        if self._ends and not recording.flows_into(getattr(output, "logits", None)):
            raise _NotReplayed("its output is not what the last module gives")
        tensors = {id(each): each for call in recording.calls for each in _tensors(tuple(call.constants))}
        versions = tuple((each, each._version) for each in tensors.values())
        return Chain(tuple(recording.calls), recording.begins_with, versions)


class _Recording:
    """A forward without values. calls: those that modules of the chain have got so far."""

    def __init__(self, tokens: Tensor, observed: Sequence[Given], begins: bool):
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._observed, self._begins = observed, begins
        self.tokens = self.fake(tokens)
        self.begins_with: Tensor | None = None
        self.calls: list[Call] = []
        self._flow(self.tokens)

    def fake(self, like: Tensor) -> Tensor:
        """A tensor of its shape without values; it may be one whose memory is given back."""
        with self._mode:
            fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return fake.requires_grad_(like.requires_grad)

    def _flow(self, value: Tensor) -> None:
        self._value, self._version = value, value._version

    def flows_into(self, x: Any) -> bool:
        """Whether x is what the last module gave, unchanged."""
        if not isinstance(x, FakeTensor) or self._value._version != self._version:
            return False
        is_alias = x.untyped_storage()._cdata == self._value.untyped_storage()._cdata
        return is_alias and _geometry(x) == _geometry(self._value)

    @contextmanager
    def stubs(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which the modules of the chain only note what they are given."""
        places = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in parts]
        try:
            for (parent, name), module in zip(places, parts.values(), strict=True):
                parent._modules[name] = _Stub(module, self)
            yield
        finally:
            for (parent, name), module in zip(places, parts.values(), strict=True):
                parent._modules[name] = module

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call, and give what the module would give, without values. Raises _NotReplayed if it is no link of the chain."""
        index = len(self.calls)
        if index >= len(self._observed) or self._observed[index].module is not module:
            raise _NotReplayed("its calls depend on values")
        given = self._observed[index]
        output = given.output
        if output is None:
            raise _NotReplayed(f"{type(module).__name__} gives more than tensors")
        data = self._find_data(index, args, kwargs)
        call = Call(module, args, kwargs, data, output.rest is not None)
        noted = Call(module, given.args, given.kwargs, data, call.takes_first)
        if given.kwargs.keys() != kwargs.keys() or not _are_equal(tuple(call.constants), tuple(noted.constants)):
            raise _NotReplayed(f"{type(module).__name__} is given what depends on data")
        if any(given.versions[id(each)] != each._version for each in _tensors(tuple(noted.constants))):
            raise _NotReplayed("a module writes to what all are given")
        if index == 0 and not self._begins:
            hidden = given.args[data] if isinstance(data, int) else given.kwargs[data]
            self.begins_with = hidden.new_zeros(()).expand(hidden.shape)
        self.calls.append(call)
        value = self.fake(output.value)
        self._flow(value)
        if output.rest is None:
            return value
        return value, *(None if each is None else self.fake(each) for each in output.rest)

    def _find_data(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
        """Where the data are among a call's arguments."""
        if index == 0 and not self._begins:
            return "hidden_states" if "hidden_states" in kwargs else 0
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        found = [name for name, value in named if self.flows_into(value)]
        if not found:
            raise _NotReplayed("code between its modules computes with data")
        return found[0]


class _Stub(nn.Module):
    """Stands for a module of the chain while a forward is recorded."""

    def __init__(self, module: nn.Module, recording: _Recording):
        super().__init__()
        # Past nn.Module, for which it would be a child with parameters.
        object.__setattr__(self, "_stubbed", module)
        self._recording = recording
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._recording.call(self._stubbed, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the code asks of the module, such as the kind of a layer."""
        value = getattr(object.__getattribute__(self, "_stubbed"), name)
        if isinstance(value, nn.Module):
            raise _NotReplayed(f"its code reaches into {type(self._stubbed).__name__} for {name}")
        # What is computed from parameters, or from what a router learns, is not constant.
        return self._recording.fake(value) if isinstance(value, Tensor) else value


class _Strict(TorchDispatchMode):
    """Refuses what would hide from tensors without values: that they are written into one with values, and random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NotReplayed("its code draws random numbers")
        if func._schema.is_mutable and len({isinstance(each, FakeTensor) for each in _tensors((args, kwargs))}) > 1:
            raise _NotReplayed("its code writes data into a constant")
        return func(*args, **(kwargs or {}))


def replay_forward(
    model: PreTrainedModel, layers: Sequence[str], begins: bool, ends: bool, unused: Sequence[str] = ()
) -> ReplayedForward | None:
    """Have the model's forward replayed where it can be. None where the model holds parameters that no module of a chain would
    have by itself: nothing is changed.

    layers: paths of the layers that are run here, in order; begins, ends, unused: as in `ReplayedForward`.
    """
    parts = _find_parts(model, layers)
    holders = [path for path, module in model.named_modules() if _holds_parameters(module)]
    if not layers or not all(_is_within(path, parts) for path in holders):
        return None
    replayed = ReplayedForward(model, parts, begins, ends, unused)
    # Wrapped: others ask for the signature.
    model.forward = wraps(model.forward)(partial(ReplayedForward.__call__, replayed))  # type: ignore[method-assign]
    return replayed


def _find_parts(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The layers, and outside of them the outermost modules that hold parameters and have no layer within."""
    parts: dict[str, nn.Module] = {path: model.get_submodule(path) for path in layers}
    for path, module in model.named_modules():
        is_above = not path or any(layer.startswith(f"{path}.") for layer in layers)
        if _holds_parameters(module) and not is_above and not _is_within(path, parts):
            parts[path] = module
    return parts


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_within(path: str, parts: Mapping[str, Any]) -> bool:
    return any(path == part or path.startswith(f"{part}.") for part in parts)


@contextmanager
def _noting(modules: Any, observed: list[Given]) -> Iterator[None]:
    """A context in which calls of the modules are noted: what the model gives them, before their own hooks, and what it gets."""
    begun: list[tuple[tuple[Any, ...], dict[str, Any], dict[int, int]]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun.append((args, kwargs, {id(each): each._version for each in _tensors((args, kwargs))}))

    def after(module: nn.Module, _: Any, output: Any) -> None:
        observed.append(Given(module, *begun.pop(), Output.of(output)))

    handles = [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(after) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, CONSTANTS)


def _are_equal(found: Any, noted: Any) -> bool:
    """Whether both are the same constants: nothing that changes behind one's back, no tensor without values or of parameters."""
    if isinstance(found, tuple):
        return type(found) is type(noted) and len(found) == len(noted) and all(map(_are_equal, found, noted))
    if type(found) is Tensor and type(noted) is Tensor:
        is_alike = (*_geometry(found), found.device) == (*_geometry(noted), noted.device)
        return is_alike and not found.requires_grad and torch.equal(found, noted)
    return _is_plain(found) and type(found) is type(noted) and found == noted


@contextmanager
def _kept_generators() -> Iterator[None]:
    """A context that leaves the generators of Python and numpy as they are. Raises _NotReplayed if numbers were drawn."""
    python, numbers = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        after = np.random.get_state(legacy=False)["state"]
        is_drawn = (after["key"] != numbers["state"]["key"]).any() or after["pos"] != numbers["state"]["pos"]
        if is_drawn or random.getstate() != python:
            raise _NotReplayed("its code draws random numbers")
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _state_of(model: nn.Module) -> list[Any]:
    """What a forward could leave behind: the attributes of all modules, and what buffers hold."""
    state: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            state.append((name, id(value), len(value) if isinstance(value, list | dict | set) else 0))
        state += [(id(each), each._version) for each in module._buffers.values() if each is not None]
    return state
