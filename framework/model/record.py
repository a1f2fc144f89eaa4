"""A family's own initialiser, recorded instead of run: its writes to each parameter, as a program.

`_init_weights` is any Python code, yet nearly all of it fills whole parameters. So the unit's parameters need no memory while it
runs, and a dispatch mode notes each write. Code that cannot be recorded (it reads values, uses whole-matrix operations, or writes
to strides that are no rectangle) is run after all: the module's own parameters get memory, and if that is not enough, all of the
unit's do. `normal_` and `uniform_` then produce the same random values as the recording would have, so the result does not depend
on which of the two happened.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import erf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from framework.errors import ModelError
from framework.mesh.box import Box, interval_to_boxes
from framework.model.counter_rng import Key, words_of
from framework.model.initial import Apply, Constant, Copy, Fill, Normal, Operation, Program, Truncated, Uniform

# Operations in place with numbers that round in one way only, wherever and in whatever chunks they run. A logarithm does not.
EXACT = frozenset(f"aten::{name}_" for name in ("mul", "add", "sub", "neg", "abs", "clamp", "clamp_min", "clamp_max"))

# torch's truncated normal samples again what is outside if more than this share is inside, else it uses another algorithm.
LEAST_INSIDE = 0.3


IS_META, DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]

Initialiser = Callable[[nn.Module], object]
Places = dict[str, list[tuple[nn.Module, str]]]  # by a parameter's name, the modules that hold it, and as what


def record(
    seed: int, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, tuple[nn.Module, Initialiser]]
) -> dict[str, Program]:
    """Programs of the `parameters`, as the modules' initialisers write them one after the other, both by their paths.

    A program is not complete where nobody writes. The parameters are as before when this returns, modules' buffers have values.
    """
    recorder = Recorder(seed, parameters)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for path, (module, initialiser) in modules.items():
            recorder.initialise(path, module, initialiser)
    return recorder.programs


class Unrecordable(Exception):
    """A write that no program can express. Never leaves this module: the initialiser is run instead."""


class AsIfReal(TorchFunctionMode):
    """Makes parameters without memory claim to be on the CPU.

    torch's orthogonal_ does nothing on meta, and tensors that an initialiser makes on their device would have no values.
    """

    def __init__(self, is_noted: Callable[[Tensor], bool]):
        super().__init__()
        self._is_noted = is_noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META and self._is_noted(args[0]):
            return False
        if func == DEVICE and self._is_noted(args[0]):
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Programs of `parameters` (by name, best on meta), as the initialisers called through `initialise` write them.

    The RNG stream of a random fill has the key (seed, parameter, number of the fill), counted for each parameter; of any other
    tensor (seed, module, number of the fill in the module's call).
    """

    def __init__(self, seed: int, parameters: Mapping[str, nn.Parameter]):
        super().__init__()
        self.programs = {name: Program(parameter.shape) for name, parameter in parameters.items()}
        self._seed = seed
        self._parameters = dict(parameters)
        self._noted = {_storage(parameter): name for name, parameter in parameters.items()}
        self._real: dict[int, str] = {}  # those that have memory for a while
        self._num_streams: Counter[str] = Counter()
        self._path = ""
        self._failed = False

    def initialise(self, path: str, module: nn.Module, initialiser: Initialiser) -> None:
        """Note what the initialiser of the module at `path` writes; run it where that fails."""
        try:
            self._attempt(path, module, initialiser, {})
        except Exception:  # whatever code does that meets a tensor without memory; a real error comes again
            self.execute(path, module, initialiser)

    def execute(self, path: str, module: nn.Module, initialiser: Initialiser) -> None:
        """Run the initialiser on memory: that of the module's own parameters, or of all."""
        everywhere: Places = {}
        for of in module.modules():
            for own_name, parameter in of.named_parameters(recurse=False):
                name = self._noted.get(_storage(parameter))
                if name is not None:
                    everywhere.setdefault(name, []).append((of, own_name))
        own = {name: slots for name, slots in everywhere.items() if any(of is module for of, _ in slots)}
        try:
            self._attempt(path, module, initialiser, own)
        except Exception:  # as above: the parameters of other modules have no memory yet
            try:
                self._attempt(path, module, initialiser, everywhere)
            except Unrecordable as error:
                raise ModelError(
                    f"the initialiser of {path or 'the model'} writes to {error}, outside of it"
                ) from error

    def _attempt(
        self,
        path: str,
        module: nn.Module,
        initialiser: Initialiser,
        places: Places,
    ) -> None:
        """One call, with memory for the parameters at `places`; nothing is noted of one that fails."""
        before = dict(self.programs), self._num_streams.copy()
        parameters = dict(module._parameters)
        self._path, self._failed = path, False
        self._num_streams.pop(_of_module(path), None)
        try:
            with self._memory(places), _truncated_by(self._truncated), AsIfReal(self._is_noted), self:
                initialiser(module)
            replaced = any(module._parameters[name] is not parameter for name, parameter in parameters.items())
            if self._failed or replaced:  # the initialiser caught it, or put another parameter there
                raise Unrecordable(path)
        except Exception:
            self.programs, self._num_streams = before
            module._parameters.update(parameters)
            raise

    @contextmanager
    def _memory(self, places: Places) -> Iterator[None]:
        """Give the parameters memory and values while it lasts; their changed values then become their programs."""
        initial = {name: self.programs[name].whole() for name in places}
        noted = dict(self._noted)
        self._noted = {key: name for key, name in noted.items() if name not in places}
        try:
            for name, slots in places.items():
                real = nn.Parameter(initial[name].clone(), requires_grad=False)
                self._real[_storage(real)] = name
                for of, own_name in slots:
                    of._parameters[own_name] = real
            yield
            for name, ((of, own_name), *_) in places.items():
                values = of.get_parameter(own_name).detach()
                if not _are_same(values, initial[name]):
                    self.programs[name] = self.programs[name].then(Copy(values.to("cpu", torch.float32)))
        finally:
            self._noted, self._real = noted, {}
            for name, slots in places.items():
                for of, own_name in slots:
                    of._parameters[own_name] = self._parameters[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _arguments(func, args, kwargs)
        written = _written(func, given)
        noted = next((each for each in written if self._is_noted(each)), None)
        if noted is not None:
            self._note(noted, self._operation(func, given, noted))
            return noted
        fill = self._random_fill(func, given, written[0]) if written and not written[0].is_meta else None
        if fill is not None:
            _write(written[0], fill)
            return written[0]
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None:
            torch.default_generator.manual_seed(words_of(self._key(None))[0])
        return func(*args, **kwargs)

    def _operation(self, func: Any, given: Mapping[str, Any], target: Tensor) -> Operation | None:
        """The operation by which the call writes to `target`, its first argument; None if a program has no such step."""
        name, others = func._schema.name, [value for key, value in given.items() if key != "self"]
        if name == "aten::zero_":
            return Constant(0.0)
        if name == "aten::fill_" and isinstance(given["value"], int | float):
            return Constant(float(given["value"]))
        if name == "aten::copy_" and not given["src"].is_meta:
            return Copy(given["src"].detach().to("cpu", torch.float32, copy=True).expand(target.shape))
        if name in EXACT and given.get("alpha", 1) == 1 and all(isinstance(x, int | float | None) for x in others):
            numbers = tuple(value for key, value in given.items() if key not in ("self", "alpha"))
            return Apply(func, numbers)
        return self._random_fill(func, given, target)

    def _random_fill(self, func: Any, given: Mapping[str, Any], target: Tensor) -> Fill | None:
        """The random fill that the call makes; None if it makes none, or uses a generator of the family's own."""
        if given.get("generator") is not None:
            return None
        if func._schema.name == "aten::normal_":
            return Normal(given["mean"], given["std"], self._key(target))
        if func._schema.name == "aten::uniform_":
            return Uniform(given["from"], given["to"], self._key(target))
        return None

    def _truncated(
        self,
        original: Callable[..., Tensor],
        tensor: Tensor,
        mean: float,
        std: float,
        low: float,
        high: float,
        **more: Any,
    ) -> Tensor:
        """Stands for torch's truncated normal, which reads the values that it has sampled and does nothing on meta."""
        inside = 0.5 * (erf((high - mean) / std / sqrt(2)) - erf((low - mean) / std / sqrt(2)))
        is_ours = inside > LEAST_INSIDE and more.get("generator") is None
        if self._is_noted(tensor):
            self._note(tensor, Truncated(mean, std, self._key(tensor), low, high) if is_ours else None)
            return tensor
        if tensor.is_meta or not is_ours:
            return original(tensor, mean, std, low, high, **more)
        _write(tensor, Truncated(mean, std, self._key(tensor), low, high))
        return tensor

    def _note(self, target: Tensor, operation: Operation | None) -> None:
        name = self._noted[_storage(target)]
        region = _region(target, self._parameters[name])
        if operation is None or region is None:
            self._failed = True
            raise Unrecordable(name)
        if isinstance(operation, Copy) and operation.values.shape != region.sizes:
            operation = Copy(operation.values.reshape(region.sizes))
        self.programs[name] = self.programs[name].then(operation, region)

    def _is_noted(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._noted

    def _key(self, target: Tensor | None) -> Key:
        """The key of the next RNG stream, of this parameter or of the call."""
        key = 0 if target is None else _storage(target)
        owner = self._noted.get(key) or self._real.get(key) or _of_module(self._path)
        self._num_streams[owner] += 1
        return (self._seed, owner, self._num_streams[owner])


@contextmanager
def _truncated_by(sample: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch's truncated normal by `sample(original, ...)`. If torch renames it, initialisers that use it are run."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name, None)
    if original is None:
        yield
        return

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return sample(original, *args, **kwargs)

    setattr(nn.init, name, replaced)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


def _write(tensor: Tensor, fill: Fill) -> None:
    """Fill a tensor that has memory: counter j of the stream is its j-th element, row-major, as in a program."""
    flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
    fill.write(flat, [Box((0,), tuple(flat.shape))], tuple(flat.shape))
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _region(view: Tensor, parameter: Tensor) -> Box | None:
    """The box of the parameter that a view of it covers, row-major both; None if it covers none."""
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    if not parameter.is_contiguous() or not 0 <= offset < max(1, parameter.numel()):
        return None
    if view.is_contiguous():
        boxes = interval_to_boxes(tuple(parameter.shape), offset, offset + view.numel())
        return boxes[0] if len(boxes) == 1 else None
    offsets, sizes, left = [], [], [(s, d) for s, d in zip(view.shape, view.stride(), strict=True) if s != 1]
    for size, stride in zip(parameter.shape, parameter.stride(), strict=True):
        first, offset = divmod(offset, int(stride))
        count = left.pop(0)[0] if left and left[0][1] == stride and size > 1 else 1
        if first + count > size:
            return None
        offsets.append(first)
        sizes.append(count)
    return None if left else Box(tuple(offsets), tuple(sizes))


def _are_same(values: Tensor, others: Tensor) -> bool:
    """Whether nothing was written; NaN marks elements that have no value yet."""
    return bool(((values == others) | (values.isnan() & others.isnan())).all())


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, defaults included."""
    declared = func._schema.arguments
    given = {each.name: each.default_value for each in declared if each.has_default_value()}
    return given | {each.name: value for each, value in zip(declared, args, strict=False)} | dict(kwargs)


def _written(func: Any, given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that the call writes."""
    if not func._schema.is_mutable:
        return []
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


def _storage(tensor: Tensor) -> int:
    """The memory of a tensor and of its views; tensors on meta have such identities, too."""
    return tensor.untyped_storage()._cdata


def _of_module(path: str) -> str:
    return f"module {path}"
