"""Layouts train under NCCL's rules as one rank does, frozen parameters or not; and bugs that are planted are seen.

gloo is more forgiving: it sends at once, from memory that stays, between every two ranks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from framework.comm.algorithms import ExposedCommunication
from framework.comm.connect import Mesh, connect
from framework.comm.transfer import Arrival, AsyncHostCopy, Download
from framework.errors import NumericsError
from framework.parallel.pipeline.execute import StageLinks
from framework.parallel.tensor.regions import RegionCall
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.hooks import UnitOrder
from framework.parallel.zero.parameters import ParameterSync
from framework.recipe.schema import Memory, Offload
from framework.train import step
from framework.train.step import run_alone
from framework.train.validation import Validation
from tests.grid import IN_TURN, few_of
from tests.nccl import gpu
from tests.nccl.layouts import (
    FROZEN,
    LAYOUTS,
    TOLERANCE,
    Z3,
    Layout,
    build_layout,
    cover,
    find_error,
    find_first,
    run,
    train,
)
from tests.nccl.simulator import installed, run_ranks
from tests.ranks.parity import CPU, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# Any two values that may meet; shown is each value. Some of the rows are of devices that run one message at a time.
COVERED = cover()
SHOWN = set(sorted(find_first(COVERED))[::4])
SHOWN_FROZEN = {
    "tied, tp 2, regather, embedding frozen",
    "tp 2, overlap, regather, zero 3, all but the head frozen",
    "pp 2, tp 2, gpipe, all but the embedding frozen",
    "cp 2, ring, zero 3, first layers frozen",
}


@pytest.fixture(autouse=True)
def simulator() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize("name", few_of(COVERED, lambda name: name in SHOWN))
def test_a_layout_of_the_covering_equals_one_rank(name: str) -> None:
    assert find_error(*COVERED[name]) < TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_rank(name: str, serial: bool) -> None:
    assert find_error(LAYOUTS[name], serial) < TOLERANCE


def test_rows_of_experts_that_travel_as_codes_train_as_one_rank_but_for_rounding() -> None:
    whole = LAYOUTS["ep 4 over nodes, overlap"]
    coded = replace(whole, parallel=replace(whole.parallel, expert_dispatch="fp8"))
    assert TOLERANCE < find_error(coded) < 1e-2


@pytest.mark.parametrize("name", few_of(FROZEN, lambda name: name in SHOWN_FROZEN))
def test_a_frozen_layout_equals_one_rank(name: str) -> None:
    assert find_error(FROZEN[name]) < TOLERANCE


CODED = replace(Z3, quantize_gather="int8", quantize_min_elements=64)
ROUNDED = {
    "int8": Layout(2, 3, zero=CODED),
    "fp8, second copy": Layout(4, zero=replace(CODED, quantize_gather="fp8", secondary_shard=2)),
    "int8, offloaded": Layout(
        4,
        zero=replace(CODED, secondary_shard=2),
        memory=Memory(offload=Offload(parameters=1.0, optimizer=1.0)),
    ),
    "int8, zero 2, divided": Layout(
        4, zero=replace(CODED, stage=2, shard_within=2, optimizer_within="all", prefetch_units=2)
    ),
}


def train_on_gloo(rank: int, world: int, rendezvous: str, layout: Layout) -> list[float]:
    """Body: the numbers of a layout on CPUs."""
    mesh = connect(topology_of(layout.recipe, layout.config), CPU, rendezvous, rank)
    found = train(layout, mesh)
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("name", "serial"),
    few_of(product(ROUNDED, (False, True)), lambda name, serial: name == "fp8, second copy" and serial),
)
def test_a_layout_whose_parameters_travel_as_codes_equals_itself_on_cpus(
    pool: RankPool, name: str, serial: bool
) -> None:
    layout = ROUNDED[name]
    expected = pool.run(layout.world, train_on_gloo, layout)
    torch.testing.assert_close(torch.tensor(run(layout, serial)), torch.tensor(expected), rtol=TOLERANCE, atol=0)


# --- planted bugs

ZERO_3, PIPELINE, OFFLOADED = LAYOUTS["dp 2, zero 3"], LAYOUTS["pp 2"], LAYOUTS["dp 2, zero 3, offloaded"]
Bug = Callable[[], AbstractContextManager[Any]]


def a_unit_is_read_before_it_has_come() -> AbstractContextManager[Any]:
    return patch.object(ParameterSync, "_wait_for_unshard", lambda self, index: None)


def a_hidden_state_is_read_before_it_has_come() -> AbstractContextManager[Any]:
    return patch.object(StageLinks, "take", lambda self, action: self._arriving.pop(action)[0])


def a_gradient_is_read_before_it_is_summed() -> AbstractContextManager[Any]:
    return patch.object(ExposedCommunication, "wait", lambda self, operations: None)


@contextmanager
def memory_of_a_unit_on_its_way_is_given_back() -> Iterator[None]:
    enter = UnitOrder.enter_backward

    def reshard_early(self: UnitOrder, position: int) -> None:
        enter(self, position)
        parameters = self._parameters
        for index in [each for each in parameters._unshards if each < self._backward]:
            for buffer in parameters.units[index]:
                buffer.full.untyped_storage().resize_(0)

    with patch.object(UnitOrder, "enter_backward", reshard_early):
        yield


@contextmanager
def memory_of_a_gradient_is_used_again_while_it_is_sent() -> Iterator[None]:
    reduce = GradientSync._reduce

    def write_early(self: GradientSync, buffer: Any) -> None:
        reduce(self, buffer)
        for reduction in list(self._reductions)[-1:]:
            if not reduction.buffer.plan.lifetimes.keeps_gradients:
                reduction.full.zero_()

    with patch.object(GradientSync, "_reduce", write_early):
        yield


@contextmanager
def one_rank_gathers_two_units_in_another_order() -> Iterator[None]:
    unshard = ParameterSync.start_unshard

    def second_first(self: ParameterSync, index: int) -> None:
        if threading.current_thread().name == "rank 1" and index == 1:
            unshard(self, 2)
        unshard(self, index)

    with patch.object(ParameterSync, "start_unshard", second_first):
        yield


@contextmanager
def one_rank_sends_two_messages_in_another_order() -> Iterator[None]:
    start, kept = StageLinks.start, []

    def swap(self: StageLinks, actions: Any, outputs: Any) -> None:
        if threading.current_thread().name != "rank 0" or len(kept) == 2:
            start(self, actions, outputs)
            return
        kept.append(actions)
        if len(kept) == 2:
            for each in reversed(kept):
                start(self, each, outputs)

    with patch.object(StageLinks, "start", swap):
        yield


def a_step_is_read_before_it_has_come() -> AbstractContextManager[Any]:
    return patch.object(AsyncHostCopy, "values", lambda self: self._host.tolist())


def an_activation_is_read_before_it_has_come_back() -> AbstractContextManager[Any]:
    return patch.object(Arrival, "wait", lambda self: None)


def an_activation_leaves_before_it_is_computed() -> AbstractContextManager[Any]:
    return patch.object(gpu.Stream, "wait_stream", lambda self, other: None)


def a_gradient_is_read_on_the_host_before_it_has_come() -> AbstractContextManager[Any]:
    return patch.object(Download, "wait", lambda self: None)


BUGS: list[tuple[Bug, Layout]] = [
    (a_unit_is_read_before_it_has_come, ZERO_3),
    (a_hidden_state_is_read_before_it_has_come, PIPELINE),
    (a_gradient_is_read_before_it_is_summed, ZERO_3),
    (memory_of_a_unit_on_its_way_is_given_back, ZERO_3),
    (memory_of_a_gradient_is_used_again_while_it_is_sent, ZERO_3),
    (one_rank_gathers_two_units_in_another_order, ZERO_3),
    (one_rank_sends_two_messages_in_another_order, PIPELINE),
    (a_step_is_read_before_it_has_come, ZERO_3),
    (an_activation_is_read_before_it_has_come_back, OFFLOADED),
    (an_activation_leaves_before_it_is_computed, OFFLOADED),
    (a_gradient_is_read_on_the_host_before_it_has_come, OFFLOADED),
]


@pytest.mark.parametrize(("bug", "layout"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_planted_bug_is_seen(bug: Bug, layout: Layout) -> None:
    with bug():
        try:
            error = find_error(layout)
        except AssertionError:
            return
    assert error > TOLERANCE


# --- what is started and dropped


@pytest.fixture
def dropped_gather() -> Iterator[None]:
    """A region's input is gathered again in backward, once more than anybody waits for."""
    start = RegionCall.start_gather

    def start_twice(self: RegionCall, kept: Any) -> None:
        start(self, kept)
        self.border.start_gather(kept)

    with patch.object(RegionCall, "start_gather", start_twice):
        yield


@pytest.mark.parametrize("name", ["dp 2, zero 2, layers left out", "dp 2, zero 3, kept, layers left out"])
def test_a_validation_waits_for_units_that_it_leaves_out(name: str) -> None:
    """They stay gathered, so that nothing else waits for them before the next update."""

    def validate(mesh: Mesh) -> None:
        trained, (microbatches, _) = build_layout(LAYOUTS[name], mesh)
        run_alone(trained, Validation(microbatches))
        mesh.waits.check_ended("a validation")

    run_ranks(topology_of(LAYOUTS[name].recipe, LAYOUTS[name].config), validate)


@pytest.mark.usefixtures("dropped_gather")
def test_an_operation_that_nobody_waits_for_is_an_error_with_its_name_at_the_end_of_the_step() -> None:
    with pytest.raises(AssertionError, match="at the end of step 0: all_gather of tokens of a region over axis tp"):
        run(LAYOUTS["tp 2, regather"])


@pytest.mark.usefixtures("dropped_gather")
def test_the_error_of_a_step_is_told_and_not_what_it_has_left_open() -> None:
    def fail(*_: Any) -> None:
        raise NumericsError("the update has failed")

    with patch.object(step, "_update", fail), pytest.raises(NumericsError, match="the update has failed"):
        run(LAYOUTS["tp 2, regather"])
