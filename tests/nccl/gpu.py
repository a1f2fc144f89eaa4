"""GPU simulator: tensors of the CPU that say they are on a GPU, and copies that are as late as CUDA allows.

`SimulatedGpu` is the device of one rank, entered by its thread. Within it `device="cuda"` makes memory of the CPU, and a tensor
says `is_cuda` unless its memory was made for the host, so that what the framework does on GPUs runs. Kernels are done at once;
copies are not:

    a copy on another stream than the computing one lands where somebody waits for an event behind it; until then its target holds
    no number, and at that point the source must have the bits and the memory that it had at the start
    such a stream reads and overwrites what the computing stream has made only up to the point for which it has waited
    what goes to the host on any stream is there when the host has waited for an event behind it
    from pageable memory, or where a value is asked for, the host waits: `waits` has the lines of code that did

`installed` puts the events and streams in the place of torch.cuda's; nothing of the framework is changed.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from framework.comm import fused

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Of every byte, where nothing has landed: NaN in every float.
NO_VALUE = 0xFF
# The host reads a value of the device, or a shape that depends on one: as Python asks, and as operators do inside of others.
ASKS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "equal"}
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
# Attributes of an untyped storage: they live as long as the memory does.
ON_HOST, PINNED, WRITTEN = "is_simulated_host", "is_simulated_pinned", "simulated_operation"

_local = threading.local()


class GpuError(AssertionError):
    """Code that a GPU would not carry out as it is meant."""


def here() -> "SimulatedGpu":
    """The GPU of this thread."""
    found: SimulatedGpu | None = getattr(_local, "gpu", None)
    if found is None:
        raise GpuError("torch.cuda was called in a thread that has entered no simulated GPU")
    return found


@contextmanager
def unseen() -> Iterator[None]:
    """A context in which the simulation works itself: on tensors of the CPU, and nobody counts."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def run_current_stream() -> None:
    """End what the current stream has been given, where that is not the computing one: NCCL's operations run behind it."""
    gpu = getattr(_local, "gpu", None)
    if gpu is not None and gpu.stream is not gpu.computing:
        gpu.stream.run_until(len(gpu.stream.given))


class HostHeld(Exception):
    """The host asks for a value that a held device will never have."""


def is_held() -> bool:
    """Whether the device of this thread, if there is one, is held up for ever."""
    gpu = getattr(_local, "gpu", None)
    return gpu is not None and gpu.computing.held_at is not None


def is_on_host(x: Tensor) -> bool:
    """Whether the memory of x, any shape, is the host's."""
    return getattr(x.untyped_storage(), ON_HOST, False)


def move_to_host(x: Tensor) -> Tensor:
    """x itself, any shape, whose memory is the host's from now on: for tensors from outside the simulation."""
    setattr(x.untyped_storage(), ON_HOST, True)
    return x


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


class Copy:
    """One copy that a stream has been given. target, source: of equal shape, any dtypes."""

    def __init__(self, target: Tensor, source: Tensor, is_behind_kernels: bool):
        # On the computing stream a device's memory may be used again at once: what does so comes later. The allocator of pinned
        # memory keeps a block until its copies have run; that of a device's knows nothing of other streams.
        self._watched = [
            (name, (lambda x=x: x) if is_on_host(x) else _refer(x))
            for name, x in (("target", target), ("source", source))
            if is_on_host(x) or not is_behind_kernels
        ]
        self._data = source.detach().clone()
        if is_behind_kernels and not is_on_host(target):
            target.copy_(source)
        else:
            target.detach().view(torch.uint8).fill_(NO_VALUE)

    def land(self) -> None:
        """End the copy. GpuError where its memory was not left alone."""
        for name, find in self._watched:
            x = find()
            if x is None:
                raise GpuError(f"the {name} of a copy was given up while it was under way")
            if name == "source":
                is_untouched = torch.equal(_bytes(x), _bytes(self._data))
            else:
                is_untouched = bool((_bytes(x) == NO_VALUE).all())
                x.copy_(self._data)
            if not is_untouched:
                raise GpuError(f"the {name} of a copy was written to while it was under way")


def _refer(x: Tensor) -> Callable[[], Tensor | None]:
    """A way to x, any shape, for as long as its memory is not given up."""
    storage, view, dtype = ref(x.untyped_storage()), (x.storage_offset(), x.shape, x.stride()), x.dtype
    num_bytes = x.untyped_storage().nbytes()

    def find() -> Tensor | None:
        memory = storage()
        is_there = memory is not None and memory.nbytes() >= num_bytes
        return torch.empty(0, dtype=dtype).set_(memory, *view) if is_there else None

    return find


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any):
        self.is_timed, self.is_blocking = enable_timing, blocking
        self._stream: Stream | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self._stream = stream or here().stream
        self.number, self.num_operations = len(self._stream.given), here().num_operations
        self._seconds = time.perf_counter()
        self._stream.num_events += 1
        self.place = self._stream.num_events

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or here().stream).wait_event(self)

    def synchronize(self) -> None:
        """The host waits, which `waits` is told."""
        here().note_wait()
        self.pass_by()

    def pass_by(self) -> None:
        """Let all that is before the event have run."""
        if self._stream is not None:
            self._stream.run_until(self.number)
            self._stream.num_passed = max(self._stream.num_passed, self.place)

    def query(self) -> bool:
        return self._stream is None or self._stream.num_passed >= self.place

    def elapsed_time(self, other: "Event") -> float:
        if not (self.is_timed and other.is_timed and self.query() and other.query()):
            raise RuntimeError("both events must have timing, be recorded and have passed")
        return 1e3 * (other._seconds - self._seconds)


class Stream:
    """Stands for torch.cuda.Stream. given: copies, and events of other streams, in order; those that have run are None."""

    def __init__(self, device: torch.device | None = None, priority: int = 0):
        self.device, self.priority = device or GPU, priority
        self.given: list[Copy | Event | None] = []
        self._num_run = self.num_events = self.num_passed = 0
        # Of the computing stream's operations, those that this stream runs behind.
        self.num_seen = 0
        # So many of its events are all that will ever pass.
        self.held_at: int | None = None

    @property
    def computes(self) -> bool:
        return here().computing is self

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event._stream is None or event._stream is self:
            return
        if event._stream.computes:
            self.num_seen = max(self.num_seen, event.num_operations)
        if self.computes:
            event._stream.run_until(event.number)
        else:
            self.given.append(event)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def run_until(self, number: int) -> None:
        """Run the first so many of what was given."""
        while self._num_run < number:
            each, self.given[self._num_run] = self.given[self._num_run], None
            self._num_run += 1
            if isinstance(each, Event):
                each._stream.run_until(each.number)
            elif each is not None:
                with unseen():
                    each.land()


class SimulatedGpu(TorchFunctionMode):
    """The GPU of one rank: made, and entered, by each thread that uses it.

    waits: `file:line` of each host wait, torch's own lines being those of who called it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computing = self.stream = Stream(GPU)
        self.num_operations = 0
        self.waits: list[str] = []

    def __enter__(self) -> "SimulatedGpu":
        self._former, _local.gpu = getattr(_local, "gpu", None), self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _local.gpu = self._former

    def synchronize(self) -> None:
        """End all that the device was given; no wait of the framework's."""
        self.computing.run_until(len(self.computing.given))
        self.computing.num_passed = self.computing.num_events

    def hold(self) -> None:
        """Hold the device up for ever, as an operation or a kernel that does not end does. What came before has passed."""
        if self.computing.held_at is None:
            self.computing.held_at = self.computing.num_passed = self.computing.num_events

    def note_wait(self) -> None:
        """Remember who makes the host wait."""
        if self.computing.held_at is not None:
            raise HostHeld
        frame = sys._getframe()
        while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            frame = frame.f_back
        self.waits.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GETTERS:
            return _GETTERS[func](self, args[0])
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            return _METHODS[name](self, *args, **kwargs)
        tensors = [x for x in _flatten((args, kwargs)) if isinstance(x, Tensor)]
        if name in ASKS and any(not is_on_host(x) for x in tensors):
            self.note_wait()
        is_pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        is_for_gpu = device is not None and torch.device(device).type == "cuda"
        if is_for_gpu:
            kwargs = {**kwargs, "device": CPU}
        result = func(*args, **kwargs)
        is_of_host = all(map(is_on_host, tensors)) if device is None else not is_for_gpu
        for x in _flatten(result):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                self._note_result(name, x, tensors, is_of_host, is_pinned)
        return result

    def _note_result(
        self, name: str, result: Tensor, tensors: Sequence[Tensor], is_of_host: bool, is_pinned: bool
    ) -> None:
        storage = result.untyped_storage()
        is_new = not any(x.device.type == "cpu" and x.untyped_storage() is storage for x in tensors)
        if is_new and is_of_host:
            setattr(storage, ON_HOST, True)
            # What comes out of a container that is not looked into seems to be new.
            setattr(storage, PINNED, is_pinned or getattr(storage, PINNED, False))
        elif self.stream is self.computing and (is_new or name.endswith("_")):
            self.num_operations += 1
            setattr(storage, WRITTEN, self.num_operations)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Tensor.copy_."""
        sides = is_on_host(target), is_on_host(source)
        is_between = sides[0] != sides[1]
        pageable = any(is_on_host(x) and not getattr(x.untyped_storage(), PINNED, False) for x in (target, source))
        if is_between and (pageable or not non_blocking):
            self.note_wait()
            self.synchronize()
            return target.copy_(source)
        if not is_between and (all(sides) or self.stream is self.computing):
            self._note_result("copy_", target.copy_(source), [target], False, False)
            return target
        if self.stream is not self.computing:
            self._check_order(target, source)
        with unseen():
            self.stream.given.append(Copy(target, source, self.stream is self.computing))
        return target

    def _check_order(self, *tensors: Tensor) -> None:
        for x in tensors:
            if getattr(x.untyped_storage(), WRITTEN, 0) > self.stream.num_seen and not is_on_host(x):
                raise GpuError("a stream copies what it has not waited for: the computing stream may still be at it")

    def to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Tensor.to."""
        named = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device | str)]
        if (
            not named
            or torch.device(named[0]).type == "meta"
            or (x.device.type == "meta" and torch.device(named[0]) == CPU)
        ):
            result = x.to(*args, **kwargs)
            self._note_result("to", result, [x], is_on_host(x), False)
            return result
        to_host = torch.device(named[0]).type == "cpu"
        args = [each for each in args if not isinstance(each, torch.device | str)]
        non_blocking, _ = kwargs.pop("non_blocking", False), kwargs.pop("device", None)
        if x.device.type != "cpu" or to_host == is_on_host(x):
            result = x.to(CPU, *args, **kwargs)
            self._note_result("to", result, [x], to_host, False)
            return result
        made = torch.empty_like(x.to(*args, **kwargs))
        if to_host:
            move_to_host(made)
        return self.copy(made, x, non_blocking)

    def pin(self, x: Tensor, *_: Any) -> Tensor:
        """Tensor.pin_memory."""
        if not is_on_host(x):
            raise RuntimeError("cannot pin 'torch.cuda.Tensor'")
        if not self.is_pinned(x):
            x = move_to_host(x.clone())
            setattr(x.untyped_storage(), PINNED, True)
        return x

    def is_pinned(self, x: Tensor, *_: Any) -> bool:
        """Tensor.is_pinned."""
        return getattr(x.untyped_storage(), PINNED, False)


def _device_of(gpu: SimulatedGpu, x: Tensor) -> torch.device:
    return GPU if x.device.type == "cpu" and not is_on_host(x) else x.device


_GETTERS = {
    Tensor.device.__get__: _device_of,
    Tensor.is_cuda.__get__: lambda gpu, x: _device_of(gpu, x).type == "cuda",
    Tensor.is_cpu.__get__: lambda gpu, x: _device_of(gpu, x).type == "cpu",
}
_METHODS = {
    "copy_": SimulatedGpu.copy,
    "to": SimulatedGpu.to,
    "cpu": lambda gpu, x: gpu.to(x, CPU),
    "cuda": lambda gpu, x: gpu.to(x, GPU),
    "pin_memory": SimulatedGpu.pin,
    "is_pinned": SimulatedGpu.is_pinned,
}


def _flatten(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for each in values:
            yield from _flatten(each)
    elif isinstance(values, dict):
        yield from _flatten(list(values.values()))
    else:
        yield values


class CountReads(TorchDispatchMode):
    """Host waits inside of operators, which Python does not ask for itself: noted by the GPU of the thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        if (func.overloadpacket.__name__ in READS or by_mask) and not is_on_host(args[0]):
            here().note_wait()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _InStream:
    """Stands for torch.cuda.stream."""

    stream: Stream

    def __enter__(self) -> None:
        object.__setattr__(self, "former", here().stream)
        here().stream = self.stream

    def __exit__(self, *_: Any) -> None:
        here().stream = self.former  # type: ignore[attr-defined]


@contextmanager
def installed() -> Iterator[None]:
    """The simulated GPUs in the place of torch.cuda's."""
    fakes = {
        "Event": Event,
        "Stream": Stream,
        "stream": _InStream,
        "current_stream": lambda device=None: here().stream,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (8, 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,),
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        make_generator = torch.Generator
        stack.enter_context(patch.object(torch, "Generator", lambda device=None: make_generator(CPU)))
        stack.enter_context(patch.object(Tensor, "_make_wrapper_subclass", _make_wrapper))
        # Some of what it compares was saved inside of operators, where no simulation is seen.
        stack.enter_context(
            patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=lambda x: (x.shape, x.dtype))
        )
        stack.enter_context(patch.object(optimizer, "_group_tensors_by_device_and_dtype", _group_tensors))
        # Torch for CUDA brings Triton along, whose kernels want a real one.
        stack.enter_context(patch.object(fused, "_choose", lambda kernels, device: kernels.plain))
        yield


_make_true_wrapper = Tensor._make_wrapper_subclass


def _make_wrapper(cls: type[Tensor], *args: Any, device: torch.device, **kwargs: Any) -> Tensor:
    """Stands for torch's: autograd asks a wrapper's device for a guard."""
    return _make_true_wrapper(cls, *args, device=CPU if torch.device(device) == GPU else device, **kwargs)


_group_by_true_device = optimizer._group_tensors_by_device_and_dtype


def _group_tensors(lists: Any, with_indices: bool) -> Any:
    """Stands for torch's, which sees through the simulation and sends scalars to the device that it finds."""
    found = _group_by_true_device(lists, with_indices)
    return {(groups[0][0].device, dtype): (groups, indices) for (_, dtype), (groups, indices) in found.items()}
