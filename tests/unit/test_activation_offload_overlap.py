"""Activation offload's copies are under way while layers compute: what starts them, what computes meanwhile, what waits.

No clock: a copy stays under way until the test lets it go, at the end of a layer's computation, and a wait before that is noted.
The copies that a thread makes in `scripts/bench/activation_offload.py` are tested here too.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.comm.transfer import NO_VALUE, CopyPair, CopyStream
from framework.mesh.topology import Axis
from framework.parallel.activation_offload import ActivationOffload, LayerPass, choose_offloaded
from scripts.bench.activation_offload import DIRECTIONS, Shares, ThreadCopyStream, length, merge, overlap
from tests.gpu.trace import read_device_events, share_under
from tests.ranks.parity import CPU
from tests.unit.test_activation_offload import NUM_LAYERS, ORDERS, Model, train

LAST = NUM_LAYERS - 1
FRACTIONS = (0.5, 0.75, 1.0)
# What the computation does, and how many layers' copies are under way there.
Seen = tuple[str, int]


class HeldCopies:
    """Copies that are under way until they are let go, or somebody waits for them. on_wait: hears of the second."""

    def __init__(self, pairs: Sequence[CopyPair], on_wait: Callable[[], None]):
        self._pairs, self._on_wait, self.is_held = pairs, on_wait, True
        for target, _ in pairs:
            target.view(torch.uint8).fill_(NO_VALUE)

    def let_go(self) -> None:
        """Be done."""
        for target, source in self._pairs:
            target.copy_(source)
        self._pairs, self.is_held = (), False

    def wait(self) -> None:
        """See `Copies`. While they are held, the computation of a GPU would stand still here."""
        if self.is_held:
            self._on_wait()
            self.let_go()


class HeldCopyStream:
    """A stream whose copies are done when it is told so. on_wait: hears of waits before that."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        self._started: list[HeldCopies] = []

    def start(self, pairs: Sequence[CopyPair]) -> HeldCopies:
        """See `CopyStream`."""
        self._started.append(HeldCopies(pairs, self._on_wait))
        return self._started[-1]

    @property
    def held(self) -> list[HeldCopies]:
        """Those under way, in order."""
        return [copies for copies in self._started if copies.is_held]

    def let_go(self) -> int:
        """All that is under way gets done; how many that were."""
        held = self.held
        for copies in held:
            copies.let_go()
        return len(held)


class Mark(torch.autograd.Function):
    """The identity, which tells that forward and backward have come here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_forward: Callable[[], None], on_backward: Callable[[], None]) -> Tensor:
        ctx.on_backward = on_backward
        on_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.on_backward()
        return gradient, None, None


class WatchedModel(Model):
    """The model, offloaded to streams whose copies are done at the end of what should lie over them: the next layer's forward, or
    the backward of the layer behind. seen: in order."""

    def __init__(self, kind: type[ActivationOffload], fraction: float):
        super().__init__()
        self.seen: list[Seen] = []
        self._to_host, self._to_device = (
            HeldCopyStream(partial(self.seen.append, (f"waits for a copy {where}", 1))) for where in DIRECTIONS
        )
        self._is_offloaded = choose_offloaded(fraction, NUM_LAYERS)
        for index, layer in enumerate(self.layers):
            layer.forward = partial(self._forward_layer, index, layer.forward)
        streams = iter((self._to_host, self._to_device))
        attach(kind, self, fraction, lambda: next(streams))

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        # Head and loss lie over the copies of the last layer.
        self.seen.append(("head", self._to_host.let_go()))
        return loss

    def _forward_layer(self, index: int, forward: Callable[..., Tensor], hidden_states: Tensor, mask: Tensor) -> Tensor:
        first = Mark.apply(hidden_states, lambda: None, partial(self._end_backward, index))
        self.seen.append((f"forward of {index} begins", len(self._to_host.held)))
        result = forward(first, mask)
        self.seen.append((f"forward of {index} ends", self._to_host.let_go()))
        return Mark.apply(result, lambda: None, partial(self._begin_backward, index))

    def _begin_backward(self, index: int) -> None:
        if index == LAST and self._is_offloaded[LAST]:
            # Its backward comes at once: of the copies back these alone have nothing to lie under.
            self._to_device.held[0].let_go()
        self.seen.append((f"backward of {index} begins", len(self._to_device.held)))

    def _end_backward(self, index: int) -> None:
        self.seen.append((f"backward of {index} ends", self._to_device.let_go()))


def attach(kind: type[ActivationOffload], model: Model, fraction: float, open_stream: Callable[[], CopyStream]) -> None:
    """Offload the model's layers by streams of some form."""
    layers = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    staying = [*model.parameters(), *(layer.scale for layer in model.layers)]
    kind(
        model, layers, choose_offloaded(fraction, NUM_LAYERS), staying, Communicator(Axis("pp", 1, 0)), CPU, open_stream
    )


def expect(order: str, fraction: float) -> Iterator[Seen]:
    """Beside the forward of each layer the copies of the one before it, from its begin to its end; beside its backward too."""
    is_offloaded = choose_offloaded(fraction, NUM_LAYERS)
    beside = [0, *map(int, is_offloaded[:-1])]
    for kind in order[::2]:
        indices = range(NUM_LAYERS) if kind == "F" else reversed(range(NUM_LAYERS))
        what = "forward" if kind == "F" else "backward"
        for index in indices:
            yield f"{what} of {index} begins", beside[index]
            yield f"{what} of {index} ends", beside[index]
        if kind == "F":
            yield "head", int(is_offloaded[LAST])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_layer_computes_from_begin_to_end_while_its_neighbours_copies_are_under_way(
    fraction: float, order: str
) -> None:
    model = WatchedModel(ActivationOffload, fraction)
    found = train(model, order)
    assert model.seen == list(expect(order, fraction))
    assert all(torch.equal(a, b) for a, b in zip(found, train(Model(), order), strict=True))


class WaitsForStores(ActivationOffload):
    """The computation waits for the copies to the host where they start."""

    def _start_store(self, this: LayerPass, staying: frozenset[int]) -> None:
        super()._start_store(this, staying)
        this.finish_store()


class WaitsForLoads(ActivationOffload):
    """The computation waits for the copies to the device where they start."""

    def _before_backward(self, this: LayerPass, gradient: Tensor) -> None:
        super()._before_backward(this, gradient)
        for storage in (each() for each in (this.previous.offloaded if this.previous else ())):
            assert storage is not None
            storage.copies.wait()


class LoadsLate(ActivationOffload):
    """A layer's copies to the device start with its own backward, not with that of the layer behind."""

    def _before_backward(self, this: LayerPass, gradient: Tensor) -> None:
        self._start_load(this)


@pytest.mark.parametrize(
    ("kind", "early_wait"),
    [(WaitsForStores, "to the host"), (WaitsForLoads, "to the device"), (LoadsLate, "to the device")],
)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_wait_that_comes_early_or_a_load_that_comes_late_is_noticed(
    kind: type[ActivationOffload], early_wait: str, fraction: float
) -> None:
    model = WatchedModel(kind, fraction)
    train(model, ORDERS[1])
    assert (f"waits for a copy {early_wait}", 1) in model.seen
    assert model.seen != list(expect(ORDERS[1], fraction))


# --- copies of a thread


def open_thread() -> ThreadCopyStream:
    return ThreadCopyStream("to or from the host", sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_copies_of_a_thread_change_no_bit(fraction: float) -> None:
    for order in ORDERS:
        model = Model()
        attach(ActivationOffload, model, fraction, open_thread)
        found = train(model, order)
        assert all(torch.equal(a, b) for a, b in zip(found, train(Model(), order), strict=True))


def test_a_thread_copies_in_the_order_of_the_starts_and_tells_its_errors() -> None:
    stream, numbers = open_thread(), [torch.full((1000,), float(number)) for number in range(5)]
    copies = [stream.start([(numbers[index + 1], numbers[index])]) for index in range(4)]
    copies[-1].wait()
    assert all(torch.equal(each, torch.zeros(1000)) for each in numbers)
    refused = stream.start([(torch.zeros(2), torch.zeros(3))])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size"):
            refused.wait()


# --- where copies lie in a trace


def test_intervals() -> None:
    assert merge([(4, 5), (0, 2), (1, 3), (5, 6)]) == [(0, 3), (4, 6)]
    assert overlap([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 8.5)]) == [(1, 2), (3, 4), (6, 7), (8, 8.5)]
    assert overlap([(0, 1)], [(1, 2)]) == []
    assert length([(0, 2), (3, 3.5)]) == 2.5


def test_time_of_copies_is_under_layers_under_others_or_exposed() -> None:
    ranges = [
        ("forward of layers.0", (0.0, 10.0)), ("copy to the host", (8.0, 20.0)), ("wait for a copy to the host", (9.0, 11.0)),
        ("forward of layers.1", (12.0, 17.0)), ("copy to the host", (30.0, 31.0)), ("copy to the device", (40.0, 41.0)),
        ("wait for a copy to the device", (39.0, 40.5)),
    ]  # fmt: skip
    assert Shares.measure(ranges, "to the host") == Shares(13.0, 6.0, 5.0, 2.0, 2.0)
    assert Shares.measure(ranges, "to the device") == Shares(1.0, 0.0, 0.5, 0.5, 1.5)


def test_a_trace_of_a_gpu_is_read(tmp_path: Path) -> None:
    """In the form in which torch.profiler writes it; `tests/gpu` asks a GPU."""
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10.0, "dur": 8.0, "args": {"device": 0, "stream": 7}}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 16.0, "dur": 4.0}
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 9.0, "dur": 2.0, "args": {"External id": 1}}
    events = [
        kernel,
        copy | {"args": {"device": 0, "stream": 20, "bytes": 4096}},
        operator,
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_device_events(path)
    assert [(event.stream, event.when, event.num_bytes) for event in found] == [
        (7, (10.0, 18.0), 0), (20, (16.0, 20.0), 4096),
    ]  # fmt: skip
    assert share_under(found[1:], found[:1]) == 0.5
