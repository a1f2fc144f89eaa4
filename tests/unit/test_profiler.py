"""Ranges of a profile: who is named, and that nothing is left of it in a run that goes on."""

import timeit
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis
from framework.train.profiler import UnitRanges


def names_of(recorded):
    return [event.name for event in recorded.events() if event.name.startswith(("forward of", "backward of"))]


def run_named():
    """Two layers, the second one named, with a gradient for the input."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    hooks = UnitRanges("layers.1", second).handles
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        second(first(torch.ones(2, 3))).sum().backward()
        with torch.no_grad():
            second(torch.ones(2, 3))
    for hook in hooks:
        hook.remove()
    return recorded, (first, second)


def test_forward_and_backward_of_a_unit_have_its_name():
    """A forward without gradients, as of a validation, has no backward."""
    recorded, _ = run_named()
    assert sorted(names_of(recorded)) == ["backward of layers.1", "forward of layers.1", "forward of layers.1"]


def test_names_change_no_gradient_and_leave_no_hook():
    _, (first, second) = run_named()
    torch.manual_seed(0)
    plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain[1](plain[0](torch.ones(2, 3))).sum().backward()
    for named, other in zip((first, second), plain, strict=True):
        assert torch.equal(named.weight.grad, other.weight.grad)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        second(torch.ones(2, 3))
    assert names_of(recorded) == []


@pytest.mark.parametrize("names", [True, False])
def test_a_communicator_names_what_it_starts_only_while_a_profiler_records(names):
    axis = Communicator(Axis("shard", 1, 0))
    axis.names_ranges = names
    with profile(activities=[ProfilerActivity.CPU]) as recorded, axis.range("all_gather", "forward of it"):
        pass
    found = [event.name for event in recorded.events() if "all_gather" in event.name]
    assert found == (["all_gather forward of it"] if names else [])
    assert names or isinstance(axis.range("x"), nullcontext)


def test_a_range_costs_nothing_to_speak_of_where_nobody_records():
    """Thousands in a step; a record_function would be 8 us each."""
    axis = Communicator(Axis("shard", 1, 0))
    assert min(timeit.repeat(lambda: axis.range("all_gather", "x"), number=1000, repeat=5)) < 2e-3
