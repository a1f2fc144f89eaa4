"""Sabotage of ZeRO: drop a wait, a reference, an order, a border, and the comparison with one process fails.

What goes wrong by a race would go wrong only now and then. So here every collective of ZeRO happens as late as it may, in
its wait, and memory that the pool hands out is not a number: the whole code does not mind, the sabotaged code always does.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.algorithms import ExposedCommunication, Pending
from framework.parallel.zero import gradients, parameters
from framework.parallel.zero.buffers import GradientState, UnitBuffer
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.hooks import UnitOrder
from framework.parallel.zero.parameters import ParameterSync
from framework.recipe.schema import Zero
from tests.families import family
from tests.laws.sabotage import Errors, Sabotage, errors_of, train_each
from tests.ranks.parity import Case, small_recipe
from tests.ranks.pool import RankFailure, RankPool
from tests.ranks.spare_model import SPARE

# One day has them all: they share a control and an oracle.
pytestmark = pytest.mark.grid(part=0)

WORLD = 3
ACCUMULATION = 2
SEQUENCES = 12
TOLERANCE = 1e-9
# A broken rule must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-5


def late(start: Callable[..., Pending]) -> Callable[..., Pending]:
    """The operation, all of it, when it is waited for. Ranks wait in one order, so they still meet."""

    def started(*args: Any, **kwargs: Any) -> Pending:
        return Pending(finish=lambda: start(*args, **kwargs).wait())

    return started


@contextmanager
def at_the_worst_moment() -> Iterator[None]:
    """Every result comes as late as it may; memory holds no number until it is written."""

    def open_gradient(buffer: UnitBuffer) -> None:
        if not buffer.gradient.numel():
            OPEN(buffer)
            buffer.gradient.fill_(torch.nan)

    with (
        patch.object(parameters, "start_all_gather", late(parameters.start_all_gather)),
        patch.object(gradients, "start_reduce_scatter", late(gradients.start_reduce_scatter)),
        patch.object(gradients, "start_all_reduce", late(gradients.start_all_reduce)),
        patch.object(UnitBuffer, "open_gradient", open_gradient),
    ):
        yield


OPEN = UnitBuffer.open_gradient


# --- waits and references


def use_a_unit_without_waiting() -> AbstractContextManager[Any]:
    """Parameters are read while they are on their way."""
    return patch.object(ParameterSync, "unshard", ParameterSync.start_unshard)


def forget_an_unshard_under_way() -> AbstractContextManager[Any]:
    """The handle of one unit, unsharded ahead, is dropped."""
    start_unshard = ParameterSync.start_unshard

    def forgetful(sync: ParameterSync, index: int) -> None:
        start_unshard(sync, index)
        if index == 2:
            sync._unshards[index] = []

    return patch.object(ParameterSync, "start_unshard", forgetful)


def update_before_reductions_end() -> AbstractContextManager[Any]:
    """The optimizer reads gradients that are on their way."""

    def wait_for_none(sync: GradientSync) -> None:
        sync._reductions.clear()

    return patch.object(GradientSync, "wait_for_reductions", wait_for_none)


def update_before_replicas_agree() -> AbstractContextManager[Any]:
    """Within HSDP: the sum over replicas is not waited for."""
    wait = ExposedCommunication.wait

    def wait_for_one(exposed: ExposedCommunication, operations: Any) -> None:
        wait(exposed, operations if len(operations) < 2 else ())

    return patch.object(ExposedCommunication, "wait", wait_for_one)


def leave_parts_as_replicas_updated_them() -> AbstractContextManager[Any]:
    """Each replica reads the old values of what the others have updated."""
    return patch.object(ParameterSync, "_start_part_updates", lambda sync: None)


def unshard_before_parts_are_updated() -> AbstractContextManager[Any]:
    """A unit is unsharded while replicas' updates are on their way."""
    start_part_updates = ParameterSync._start_part_updates

    def hasty(sync: ParameterSync) -> None:
        start_part_updates(sync)
        sync._part_updates = {}

    return patch.object(ParameterSync, "_start_part_updates", hasty)


# --- order


def reduce_one_microbatch_early() -> AbstractContextManager[Any]:
    """The first of two backward passes is taken for the last."""
    start_backward = GradientSync.start_backward
    return patch.object(GradientSync, "start_backward", lambda sync, is_last: start_backward(sync, not is_last))


def reduce_one_unit_early() -> AbstractContextManager[Any]:
    """A unit is reduced when its backward begins."""
    reduce = UnitOrder._reduce
    return patch.object(UnitOrder, "_reduce", lambda order, index: reduce(order, max(index - 1, 0)))


def reshard_what_is_in_use() -> AbstractContextManager[Any]:
    """A unit is resharded before it has been read."""
    unshard = ParameterSync.unshard

    def hasty(sync: ParameterSync, index: int) -> None:
        unshard(sync, index)
        sync.reshard(index)

    return patch.object(ParameterSync, "unshard", hasty)


def keep_old_parameters() -> AbstractContextManager[Any]:
    """What was unsharded before an update is read after it."""
    return patch.object(ParameterSync, "invalidate", lambda sync: None)


# --- borders


def count_the_padding() -> AbstractContextManager[Any]:
    """The norm goes over the whole of a rank's part, its padded tail included."""
    return patch.object(UnitBuffer, "counted_elements", lambda buffer, values: [values])


def leave_unwritten_gradients() -> AbstractContextManager[Any]:
    """A parameter that got no gradient keeps what the memory held."""

    whole_reduce = GradientSync._reduce

    def reduce(sync: GradientSync, buffer: UnitBuffer) -> None:
        for grad_view in buffer.grad_views.values():
            grad_view.state = GradientState.WRITTEN
        whole_reduce(sync, buffer)

    return patch.object(GradientSync, "_reduce", reduce)


def count_a_tied_parameter_twice() -> AbstractContextManager[Any]:
    """The norm counts the embedding once more, as the head."""
    counted = UnitBuffer.counted_elements

    def twice(buffer: UnitBuffer, values: Tensor) -> list[Tensor]:
        return counted(buffer, values) * (2 if buffer.unit == "embedding" else 1)

    return patch.object(UnitBuffer, "counted_elements", twice)


def case(zero: Zero, world: int = WORLD, tied: bool = False) -> Case:
    recipe = small_recipe("fp64", world, ACCUMULATION, SEQUENCES, 0.05, zero)
    within = "" if zero.shard_within is None else f" within {zero.shard_within}"
    within += " divided" * (zero.optimizer_within == "all")
    return Case(
        f"stage {zero.stage}{within}{' tied' * tied}", family("llama"), {"": recipe}, {"tie_word_embeddings": tied}
    )


def spare_case(zero: Zero) -> Case:
    """A model with parameters that backward never reaches."""
    recipe = small_recipe("fp64", WORLD, ACCUMULATION, SEQUENCES, 0.01, zero)
    return Case("spare", SPARE, {"": recipe}, by_microbatch=True)


STAGE_1, STAGE_2, STAGE_3 = (Zero(stage=stage) for stage in (1, 2, 3))
HSDP = Zero(stage=2, shard_within=2)
DIVIDED = Zero(stage=3, shard_within=2, optimizer_within="all")

# What is dropped, where it shows, and the quantity in which it must; None: the code itself sees it.
SABOTAGES = (
    (use_a_unit_without_waiting, case(STAGE_1), "loss"),
    (use_a_unit_without_waiting, case(STAGE_3), "loss"),
    (forget_an_unshard_under_way, case(STAGE_3), "loss"),
    (update_before_reductions_end, case(STAGE_2), "gradient, step 1"),
    (update_before_replicas_agree, case(HSDP, 4), "gradient, step 1"),
    (update_before_replicas_agree, case(DIVIDED, 4), "gradient, step 1"),
    (leave_parts_as_replicas_updated_them, case(DIVIDED, 4), "loss"),
    (unshard_before_parts_are_updated, case(DIVIDED, 4), "loss"),
    (reduce_one_microbatch_early, case(STAGE_1), "gradient, step 1"),
    (reduce_one_unit_early, case(STAGE_2), None),
    (reshard_what_is_in_use, case(STAGE_3), None),
    (keep_old_parameters, case(STAGE_2), "loss"),
    (count_the_padding, case(STAGE_2), "gradient norm"),
    (leave_unwritten_gradients, spare_case(STAGE_2), "gradient, step 1"),
    (count_a_tied_parameter_twice, case(STAGE_3, tied=True), "gradient norm"),
)


CASES = {each.name: each for _, each, _ in SABOTAGES}


@pytest.fixture(scope="module")
def errors(pool: RankPool) -> Callable[[str], Errors]:
    """Of a case, found once: under those sabotages that the code itself does not see."""

    def find(name: str) -> Errors:
        sabotages = [sabotage for sabotage, of, quantity in SABOTAGES if of.name == name and quantity is not None]
        return errors_of(pool, sabotages, CASES[name], at_the_worst_moment)

    return cache(find)


@pytest.mark.parametrize("name", CASES)
def test_whole_code_stands_the_worst_moment(errors: Callable[[str], Errors], name: str) -> None:
    assert max(errors(name)["whole"].values()) < TOLERANCE


@pytest.mark.parametrize(
    ("sabotage", "of", "quantity"), SABOTAGES, ids=[f"{sabotage.__name__} {of.name}" for sabotage, of, _ in SABOTAGES]
)
def test_a_dropped_rule_shows(
    pool: RankPool, errors: Callable[[str], Errors], sabotage: Sabotage, of: Case, quantity: str | None
) -> None:
    if quantity is None:
        with pytest.raises(RankFailure, match=r"LayoutError|out of bounds for storage of size 0"):
            pool.run(of.recipe.launch.ranks, train_each, [sabotage], of, at_the_worst_moment)
    else:
        assert errors(of.name)[sabotage.__name__][quantity] > VISIBLE
