"""Activation offload: what some layers keep for backward lies on the host until their backward comes.

    forward of i      what autograd keeps is noted (saved-tensor hooks), and stays where it is
    it ends           its storages start to the host, under the forward of i+1
    i+1 ends          the computation waits for that; the device's memory is given up
    backward of i+1   begins by starting the storages of i back to the device, and computes meanwhile
    backward of i     waits for a storage where it reads it first, and gives it up where it has read it last

Every forward has its own copies, so any number of microbatches may be between forward and backward, and backward may read a graph
twice. Storages are copied, not tensors: views of one travel once, with their strides, so kernels see what they would have seen.
A layer's output is the next one's input: neighbours share its copy.

These stay on the device: unit buffers, which come and go under views of parameters; the model's buffers; what a layer is given
beside hidden states (masks, rotary tables), because all layers share it; hidden states that a pipeline stage has received, which
the executor holds for their gradient; storages below LEAST_BYTES. A layer with activation checkpointing keeps its input alone, so
that is what leaves; what is computed again in its backward stays.

Torch has `save_on_cpu`, which copies every view on its own and has the computation wait for each copy. torchtune's hooks copy
beside the computation, yet start a copy back only where backward has come to ask for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from framework.comm.communicator import Communicator
from framework.comm.transfer import Copies, CopyPair, CopyStream, segment_on_host
from framework.errors import ModelError
from framework.parallel.stage_plan import StagePlan
from framework.torch_private import storage_number, tree_leaves, version_of

# Starting a copy costs the host about 10 us, in which PCIe carries some 250 KB. So the bound is not about speed: the numbers that
# are left below it (a scalar per token and layer, in small microbatches) are too few to matter.
LEAST_BYTES = 1024

# Storages begin at such boundaries of a host block, as allocators place them.
ALIGNMENT = 64


def choose_offloaded(fraction: float, num_layers: int) -> tuple[bool, ...]:
    """Choose the layers of a stage to offload: at least `fraction` of them, evenly spread, from the first on. The last stays on
    the device unless all go: its backward comes at once, and covers the first copy back."""
    count = ceil(fraction * num_layers - 1e-9)  # 0.7 * 10 is 7.000000000000001
    before = [-(-index * count // num_layers) for index in range(num_layers + 1)]
    return tuple(before[index + 1] > before[index] for index in range(num_layers))


class HostPool:
    """Blocks of host memory that outlive their use. num_bytes: of all blocks.

    New memory would cost a page fault every 4 KiB on CPUs, and pinning it a call of the driver that waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._idle: list[Tensor] = []

    def take(self, num_bytes: int) -> "HostBlock":
        """A block of at least so many bytes, of any content."""
        self._idle.sort(key=Tensor.numel)
        for index, block in enumerate(self._idle):
            if block.numel() >= num_bytes:
                return HostBlock(self, self._idle.pop(index))
        # Sizes that grow (rows of experts) would else leave every smaller block behind for the rest of the run.
        if self._idle:
            self.num_bytes -= self._idle.pop().numel()
        self.num_bytes += num_bytes
        return HostBlock(self, segment_on_host(num_bytes, self._device))

    def give_back(self, memory: Tensor) -> None:
        """Let later forwards use a block's memory."""
        self._idle.append(memory)


class HostBlock:
    """Memory of the pool, uint8 [n], which goes back there with the last storage that lies in it."""

    def __init__(self, pool: HostPool, memory: Tensor):
        self._pool, self.memory = pool, memory

    def __del__(self) -> None:
        # No copy out of it runs any more, or the computation waits for it before the next one into it: see `OffloadedStorage`.
        self._pool.give_back(self.memory)


class OffloadedStorage:
    """One storage's bytes: on the host, and on the device from the prefetch until all who saved it have read it.

    host: uint8 [n], of the block. readers: tensors of autograd's graph that are views of it. copies: fill `loaded`.
    """

    def __init__(self, host: Tensor, block: HostBlock, device: torch.device):
        self.host, self._block, self._device = host, block, device
        self.readers: list[ref[SavedTensor]] = []
        self.loaded: Tensor | None = None
        self.copies: Copies | None = None
        self._unread = 0

    def start_load(self) -> CopyPair:
        """Have memory on the device, and say what has to be copied there: by `copies`, which whoever starts them sets."""
        self.loaded = torch.empty(self.host.numel(), dtype=torch.uint8, device=self._device)
        self._unread = sum(reader() is not None for reader in self.readers)
        return self.loaded, self.host

    def read(self) -> Tensor:
        """The bytes on the device, uint8 [n], once the current stream has them. The last reader's are its own."""
        assert self.loaded is not None, "read before it was started back"
        assert self.copies is not None, "memory on the device without copies to it"
        self.copies.wait()
        loaded = self.loaded
        self._unread -= 1
        if self._unread <= 0:  # a graph that is kept may be read again: that brings it again
            self.loaded = self.copies = None
        return loaded

    def __del__(self) -> None:
        # A backward that never came: the copy must not write into memory that the computation gets next, nor read from a block
        # that the next forward fills.
        if self.copies is not None:
            self.copies.wait()


class SavedTensor:
    """Stand-in that autograd keeps for a saved tensor: the tensor, or once it is offloaded its view of a storage."""

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)
        self.storage: OffloadedStorage | None = None
        self._dtype, self._shape, self._stride, self._offset = (
            tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(),
        )  # fmt: skip

    @property
    def here(self) -> Tensor:
        """The tensor, before it has left."""
        assert self.tensor is not None, "a saved tensor that has left already"
        refuse_written(self.tensor, self.version)
        return self.tensor

    def leave(self, storage: OffloadedStorage) -> None:
        """From now on it lies in the storage, and the tensor may go."""
        self.tensor, self.storage = None, storage
        storage.readers.append(ref(self))

    def view(self, loaded: Tensor) -> Tensor:
        """The tensor as a view of its storage's bytes."""
        view = torch.empty(0, dtype=self._dtype, device=loaded.device)
        return view.set_(loaded.untyped_storage(), self._offset, self._shape, self._stride)


def refuse_written(tensor: Tensor, version: int) -> None:
    """Raises ModelError where what backward needs was written to, as autograd does for what it keeps itself."""
    if version_of(tensor) != version:
        raise ModelError(
            f"a tensor {tuple(tensor.shape)} that backward needs was written to in place after it was kept: the model cannot be"
            " trained (torch says the same without memory.offload.activations, at its backward)"
        )


class LayerPass:
    """One forward of one layer, and what it has kept. previous: the layer's before it in the same forward.

    saved: in forward, what autograd keeps. sources: on their way to the host, by number of the storage: bytes on the device, and
    their copy; watched: tensors that lie there, with their versions; copies: empty `sources`. offloaded: the copies, as long as
    autograd holds them.
    """

    def __init__(self, name: str, previous: "LayerPass | None"):
        self.name, self.previous = name, previous
        self.saved: list[ref[SavedTensor]] = []
        self.sources: dict[int, tuple[Tensor, OffloadedStorage]] = {}
        self.watched: list[tuple[Tensor, int]] = []
        self.offloaded: list[ref[OffloadedStorage]] = []
        self.copies: Copies | None = None

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Note a tensor that autograd keeps."""
        saved = SavedTensor(tensor)
        self.saved.append(ref(saved))
        return saved

    def take_saved(self) -> Iterator[SavedTensor]:
        """Take the stand-ins that autograd still keeps, each once."""
        saved, self.saved = self.saved, []
        yield from filter(None, (each() for each in saved))

    def leave_in(self, storage: OffloadedStorage, users: Sequence[SavedTensor]) -> None:
        """Have the tensors lie in the storage from now on."""
        self.offloaded.append(ref(storage))
        for saved in users:
            saved.leave(storage)

    def finish_store(self) -> None:
        """Wait for the copies to the host, and give up the device's memory."""
        # Before the memory goes: a kernel that comes next may be given it and write to it.
        if self.copies is not None:
            self.copies.wait()
        for tensor, version in self.watched:
            refuse_written(tensor, version)
        self.sources, self.watched, self.copies = {}, [], None


def offload_activations(model: nn.Module, plan: StagePlan, staying: Sequence[Tensor]) -> "ActivationOffload | None":
    """Offload as many of the stage's layers as the recipe asks for: bitwise the same result. None where that is none.

    staying: tensors whose storages are never copied: the unit buffers.
    """
    layers = {unit.name: model.get_submodule(unit.root) for unit in plan.own_units if unit.is_layer}
    is_offloaded = choose_offloaded(plan.recipe.memory.offload.activations, len(layers))
    if not any(is_offloaded):
        return None
    return ActivationOffload(model, layers, is_offloaded, [*staying, *model.buffers()], plan.axes["pp"], plan.device)


class ActivationOffload:
    """The offloaded layers of one stage, over all microbatches.

    layers: name and module, in order of computation; is_offloaded: for each. staying: tensors whose storages are never copied.
    axis: names the copies in a profiler's trace. pool: of host memory. open_stream: opens the stream of the copies to the host,
    then that of the copies to the device.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        is_offloaded: Sequence[bool],
        staying: Sequence[Tensor],
        axis: Communicator,
        device: torch.device,
        open_stream: Callable[[], CopyStream] = CopyStream,
    ):
        self.pool = HostPool(device)
        self._staying = frozenset(map(storage_number, staying))
        self._axis, self._device = axis, device
        self._to_host, self._to_device = open_stream(), open_stream()
        self._current: LayerPass | None = None
        model.register_forward_pre_hook(self._before_model)
        model.register_forward_hook(self._after_model)
        for (name, layer), offloads in zip(layers.items(), is_offloaded, strict=True):
            layer.forward = partial(self._forward, name, offloads, layer.forward)  # type: ignore[method-assign]

    # Hooks of the model for the beginning and the end. A layer's forward is wrapped: saved-tensor hooks that a hook of the layer
    # opens would stay open where its forward raises.

    def _before_model(self, module: nn.Module, args: Any) -> None:
        self._current = None

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._current is not None:
            self._current.finish_store()
        self._current = None

    def _forward(self, name: str, offloads: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if "hidden_states" in kwargs:  # what is given by name, activation checkpointing holds out of the hooks' reach
            args = (kwargs.pop("hidden_states"), *args)
        this, previous = LayerPass(name, self._current), self._current
        if offloads:
            with saved_tensors_hooks(this.pack, self._unpack):
                output = forward(*args, **kwargs)
            self._start_store(this, self._staying | _given_from_outside(args[:1], args[1:], kwargs))
        else:
            output = forward(*args, **kwargs)
        # Behind the copies' start: they run under the next layer, and so did those before them under this one.
        if previous is not None:
            previous.finish_store()
        self._current = this
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, this))
        return output

    def _start_store(self, this: LayerPass, staying: frozenset[int]) -> None:
        """Start to copy what the layer has kept to the host, each storage once."""
        known = {} if this.previous is None else this.previous.sources
        fresh: dict[int, list[SavedTensor]] = {}
        for saved in this.take_saved():
            number = self._number_of(saved.here)
            if number in known:
                this.leave_in(known[number][1], [saved])
            elif number is not None and number not in staying:
                fresh.setdefault(number, []).append(saved)
        for number, source, storage in self._allot(fresh):
            this.sources[number] = source, storage
            this.watched.append((fresh[number][0].here, fresh[number][0].version))
            this.leave_in(storage, fresh[number])
        if fresh:
            with self._axis.range("to the host: activations of", this.name):
                pairs = [(storage.host, source) for source, storage in this.sources.values()]
                this.copies = self._to_host.start(pairs)

    def _allot(self, fresh: Mapping[int, Sequence[SavedTensor]]) -> Iterator[tuple[int, Tensor, OffloadedStorage]]:
        """(number, bytes on the device, their place on the host) of each storage, side by side in one block."""
        sources = {number: _bytes_of(users[0].here) for number, users in fresh.items()}
        block = self.pool.take(sum(_aligned(source.numel()) for source in sources.values()))
        start = 0
        for number, source in sources.items():
            place = block.memory[start : start + source.numel()]
            yield number, source, OffloadedStorage(place, block, self._device)
            start += _aligned(source.numel())

    def _number_of(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage; None where it stays for what it is: a parameter, a tensor of another kind or
        device, of a value that is negated or conjugated where it is read, or small."""
        if type(tensor) is not Tensor or tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() < LEAST_BYTES:
            return None
        return storage_number(tensor)

    def _before_backward(self, this: LayerPass, gradient: Tensor) -> None:
        """Enter a layer's backward: its storages are on their way already, unless it is the first; those of the one before it
        start."""
        self._start_load(this)
        if this.previous is not None:
            self._start_load(this.previous)

    def _start_load(self, this: LayerPass) -> None:
        held = filter(None, (each() for each in this.offloaded))
        absent = [storage for storage in held if storage.loaded is None]
        if absent:
            with self._axis.range("to the device: activations of", this.name):
                self._bring(absent)

    def _bring(self, storages: Sequence[OffloadedStorage]) -> None:
        copies = self._to_device.start([storage.start_load() for storage in storages])
        for storage in storages:
            storage.copies = copies

    def _unpack(self, saved: SavedTensor) -> Tensor:
        if saved.storage is None:
            return saved.here
        # A graph that is read once more, or a layer that backward enters by another way than its output.
        if saved.storage.loaded is None:
            self._bring([saved.storage])
        return saved.view(saved.storage.read())


def _given_from_outside(hidden: Any, *others: Any) -> frozenset[int]:
    """Storages that are not the layer's to send away. hidden: the layer's input; others: what else it is given."""
    received = [
        each for each in tree_leaves(hidden) if isinstance(each, Tensor) and each.is_leaf and each.requires_grad
    ]
    shared = [each for each in tree_leaves(others) if isinstance(each, Tensor)]
    return frozenset(map(storage_number, received + shared))


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the tensor's storage, uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
