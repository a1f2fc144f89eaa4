"""Sabotage of quantised gradients: what could go wrong in two hops of codes, and the comparison with one process fails."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from framework.comm.codec import BlockCodec, _CodedParts
from framework.parallel.zero import gradients
from framework.parallel.zero.buffers import UnitBuffer
from framework.recipe.schema import Zero
from framework.verify.compare import compare
from tests.families import family
from tests.laws.sabotage import Errors, train_each, whole
from tests.ranks.parity import Case
from tests.ranks.pool import RankPool
from tests.ranks.quantized import run_quantized_oracle
from tests.ranks.test_quantized_gradients import recipe_of

pytestmark = pytest.mark.grid(part=0)

WORLD = 4
TOLERANCE, VISIBLE = 1e-9, 1e-4
# An embedding whose numbers four ranks do not divide.
ODD = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}
CASE = Case("llama", family("llama"), {"": recipe_of(Zero(stage=3), "int8", 2)}, ODD)
OPEN = UnitBuffer.open_gradient


def scales_stay_behind() -> AbstractContextManager[Any]:
    """Codes come with the scales of the first rank only."""
    decode_sum = BlockCodec.decode_sum

    def decode(codec: BlockCodec, messages: Tensor, out: Tensor) -> None:
        scales = 4 * -(-out.shape[-1] // codec.block)
        messages[1:, ..., :scales] = messages[0, ..., :scales]
        decode_sum(codec, messages, out)

    return patch.object(BlockCodec, "decode_sum", decode)


def the_second_hop_goes_in_another_order() -> AbstractContextManager[Any]:
    """Sums of a node are sent to the nodes from last to first."""
    init = _CodedParts.__init__

    def reverse(parts: _CodedParts, rows: Tensor, axis: Any, wire: Any) -> None:
        init(parts, rows.flip(0) if axis.name.endswith("_outer") else rows, axis, wire)

    return patch.object(_CodedParts, "__init__", reverse)


def the_first_hop_goes_in_the_order_of_ranks() -> AbstractContextManager[Any]:
    """A neighbour gets the parts of neighbours, and not those of its own place on all nodes."""
    init = _CodedParts.__init__

    def unturned(parts: _CodedParts, rows: Tensor, axis: Any, wire: Any) -> None:
        if axis.name.endswith("_inner"):
            rows = rows.transpose(0, 1).reshape(rows.shape[0], rows.shape[1], -1)
        init(parts, rows, axis, wire)

    return patch.object(_CodedParts, "__init__", unturned)


def codes_count_twice_in_the_norm() -> AbstractContextManager[Any]:
    """What has come as codes is counted again."""
    counted = UnitBuffer.counted_elements

    def twice(buffer: UnitBuffer, values: Tensor) -> list[Tensor]:
        return counted(buffer, values) * (1 if buffer.plan.dtypes.reduced is None else 2)

    return patch.object(UnitBuffer, "counted_elements", twice)


def padding_counts() -> AbstractContextManager[Any]:
    """What another unit has left behind the last parameter decides the scale of its block."""
    return patch.object(gradients, "_clear_padding", lambda buffer: None)


@contextmanager
def memory_is_used() -> Iterator[None]:
    """New memory holds what no gradient is as large as."""

    def open_gradient(buffer: UnitBuffer) -> None:
        if not buffer.gradient.numel():
            OPEN(buffer)
            buffer.gradient.fill_(1e3)

    with patch.object(UnitBuffer, "open_gradient", open_gradient):
        yield


SABOTAGES = {
    scales_stay_behind: "gradient, step 1",
    the_second_hop_goes_in_another_order: "gradient, step 1",
    the_first_hop_goes_in_the_order_of_ranks: "gradient, step 1",
    codes_count_twice_in_the_norm: "gradient norm",
    padding_counts: "gradient, step 1",
}


@pytest.fixture(scope="module")
def errors(pool: RankPool) -> Callable[[], Errors]:
    """Of the whole code and under each sabotage, found once."""

    def find() -> Errors:
        found = pool.run(WORLD, train_each, [whole, *SABOTAGES], CASE, memory_is_used, timeout_s=300)[0]
        expected = run_quantized_oracle(CASE, CASE.layouts[""])
        return {name: {row.quantity: row.error for row in compare(each, expected)} for name, each in found.items()}

    return cache(find)


def test_whole_code_is_within_the_tolerance(errors: Callable[[], Errors]) -> None:
    assert max(errors()["whole"].values()) < TOLERANCE


@pytest.mark.parametrize(("sabotage", "quantity"), SABOTAGES.items(), ids=[each.__name__ for each in SABOTAGES])
def test_sabotage_shows(errors: Callable[[], Errors], sabotage: Callable[[], Any], quantity: str) -> None:
    assert errors()[sabotage.__name__][quantity] > VISIBLE
