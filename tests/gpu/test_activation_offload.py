"""Activation offload on a GPU: copies run on streams of their own, and under kernels. Not run on a GPU yet."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from framework.recipe.schema import Batch, Memory, Model, Offload, Recipe
from framework.train.state import read_entries
from framework.train.step import train_step
from tests.families import build_config, family
from tests.gpu.trace import DeviceEvent, read_device_events, share_under
from tests.gpu.training import LR, Training, start
from tests.ranks.parity import small_recipe

# With activation checkpointing a layer sends its input alone, [SEQUENCES * CONTEXT, WIDTH] in fp32: 34 MB, which take 1.3 ms of
# PCIe 4, 2.7 ms of PCIe 3. Its forward is 2.3e11 FLOPs: without TF32 3 ms of the fastest GPUs (80e12 a second), 14 ms of a V100.
# Its backward is three times that. So the copies have room, and a host that is slow to launch kernels does too.
WIDTH, LAYERS, SEQUENCES, CONTEXT = 1024, 12, 16, 512
SHAPE = {
    "hidden_size": WIDTH, "intermediate_size": 2816, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": CONTEXT,
}  # fmt: skip
COPIED_BYTES = SEQUENCES * CONTEXT * WIDTH * 4
STEPS = 3
# Of each direction. One copy of twelve has little to lie under: the last layer's on its way to the host a small head, on its way
# back nothing, because its backward comes at once.
LEAST_SHARE = 0.8


def make_recipe(fraction: float) -> Recipe:
    """Attention of kernels that add in a fixed order."""
    return replace(
        small_recipe("fp32", 1),
        model=Model(attention="eager"),
        batch=Batch(sequences_per_step=SEQUENCES, sequences_per_microbatch=SEQUENCES, context=CONTEXT),
        memory=Memory(compile="never", activation_checkpointing="full", offload=Offload(activations=fraction)),
    )


def start_large(device: torch.device, fraction: float) -> Training:
    """A model whose layers compute longer than their copies take."""
    config = build_config(family("llama"), **SHAPE)
    return start(make_recipe(fraction), device, num_batches=STEPS, config=config)


@pytest.fixture(scope="module")
def events(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> list[DeviceEvent]:
    """What the GPU did in a few steps, behind those in which memory is pinned."""
    training = start_large(device, 1.0)
    for step, microbatches in enumerate(training.batches):
        train_step(training.run, microbatches, step, LR)
    torch.cuda.synchronize(device)
    # The host's own operators are left out: to record them would have it launch kernels late.
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for step, microbatches in enumerate(training.batches, STEPS):
            train_step(training.run, microbatches, step, LR)
        torch.cuda.synchronize(device)
    trace = tmp_path_factory.mktemp("trace") / "offload.json"
    recorded.export_chrome_trace(str(trace))
    training.run.mesh.close()
    return read_device_events(trace)


def find_kernels(events: list[DeviceEvent]) -> list[DeviceEvent]:
    """Those of the stream that computes."""
    kernels = [event for event in events if event.category == "kernel"]
    ((compute, _),) = Counter(event.stream for event in kernels).most_common(1)
    return [event for event in kernels if event.stream == compute]


def find_copies(events: list[DeviceEvent], direction: str) -> list[DeviceEvent]:
    """Those of activations, by their size: tokens, and what a step reports, are small."""
    return [event for event in events if event.name.startswith(direction) and event.num_bytes == COPIED_BYTES]


DIRECTIONS = ("Memcpy DtoH", "Memcpy HtoD")


def test_each_direction_has_a_stream_of_its_own(events: list[DeviceEvent]) -> None:
    streams = [{event.stream for event in find_copies(events, direction)} for direction in DIRECTIONS]
    assert [len(each) for each in streams] == [1, 1]
    assert not streams[0] & streams[1]
    assert not (streams[0] | streams[1]) & {event.stream for event in events if event.category == "kernel"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_copies_lie_under_kernels(events: list[DeviceEvent], direction: str) -> None:
    copies = find_copies(events, direction)
    assert len(copies) == LAYERS * STEPS
    share = share_under(copies, find_kernels(events))
    taken = sum(end - begin for begin, end in (event.when for event in copies)) / len(copies)
    assert share >= LEAST_SHARE, (
        f"{share:.1%} of copies that take {taken:.0f} us each, {COPIED_BYTES / taken / 1e3:.1f} GB/s"
    )


def train(device: torch.device, fraction: float) -> tuple[list[float], dict[str, Tensor]]:
    """Loss and norm of each step; weights and moments behind the last."""
    training = start_large(device, fraction)
    found: list[float] = []
    for step, microbatches in enumerate(training.batches):
        values = train_step(training.run, microbatches, step, LR).read()
        found += [values.loss, values.gradient_norm]
    entries = {entry.name: entry.data.cpu() for entry in read_entries(training.run)}
    training.run.mesh.close()
    return found, entries


def test_copies_under_kernels_change_no_bit(device: torch.device) -> None:
    """In the size in which they are under way together: an order that is wrong would show."""
    expected_values, expected = train(device, 0.0)
    found_values, found = train(device, 1.0)
    assert found_values == expected_values
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
