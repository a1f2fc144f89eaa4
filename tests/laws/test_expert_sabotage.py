"""Sabotage of expert parallelism: each bug that other frameworks have shipped, put into this one, and the comparison with one
process fails. Who reported it stands in the sabotage's docstring; what no one has reported is what the laws forbid.

Each sabotage patches one function, inside the ranks of one body; the oracle beside them stays whole.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

from framework.comm import duals
from framework.comm.codec import BlockCodec
from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.parallel.experts import dispatch, halves, route, rows
from framework.parallel.experts.dispatch import ExpertDispatch
from framework.parallel.experts.route import DispatchedRows, Hop
from framework.parallel.experts.rows import RowExchange
from framework.parallel.zero import gradients
from framework.parallel.zero.buffers import GradientState, MainGradView, UnitBuffer
from framework.recipe.schema import Parallel, Zero
from framework.train.stage import RankStage
from tests.families import family
from tests.laws.sabotage import Errors, Sabotage, errors_of
from tests.ranks.parity import Case, small_recipe
from tests.ranks.pool import RankPool

# One day has them all: they share a control and an oracle.
pytestmark = pytest.mark.grid(part=1)

TOLERANCE = 1e-9
# A broken law must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-4
ACCUMULATION = 2

ROUTE, COMBINE, SPREAD, SCATTER = ExpertDispatch._route, route.combine, route.spread, duals.scatter


# --- gradients


def scale_by_the_ranks_that_share() -> AbstractContextManager[Any]:
    """Gradients of experts are ep times too large, because the tokens of all ranks are in each: pytorch 160285."""
    add = MainGradView.add_stacked_matmul
    return patch.object(
        MainGradView, "add_stacked_matmul", lambda view, left, right, groups: add(view, 2 * left, right, groups)
    )


def keep_the_input_gradient_of_own_experts() -> AbstractContextManager[Any]:
    """What experts of other ranks say about a token's hidden state is lost: the loss was 1.6 instead of 1.4. Automodel 1260."""
    pass_on = DispatchedRows.pass_on

    def lose(self: DispatchedRows) -> None:
        transfer = self._there[1]
        first = sum(transfer.sent[: transfer.axis.rank])
        is_own = torch.zeros(sum(transfer.sent), 1, dtype=torch.bool)
        is_own[first : first + transfer.sent[transfer.axis.rank]] = True
        with patch.object(route, "spread", lambda *given: _detach_others(SPREAD(*given), is_own)):
            pass_on(self)

    return patch.object(DispatchedRows, "pass_on", lose)


def _detach_others(rows: Tensor, is_own: Tensor) -> Tensor:
    return torch.where(is_own, rows, rows.detach())


def detach_the_weights() -> AbstractContextManager[Any]:
    """The weights of a token's experts leave autograd's graph, and routers learn nothing: Automodel 2995."""
    return patch.object(route, "combine", lambda y, weights, order: COMBINE(y, weights.detach(), order))


def send_every_copy() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank sends the tokens that all of them hold, and gradients of experts are tp times too large:
    Automodel 2995."""
    return patch.object(
        ExpertDispatch, "__call__", lambda self, hidden, index, weights: self._route(hidden, index, weights, None)
    )


def _is_own(self: ExpertDispatch, index: Tensor) -> Tensor:
    """[T, k] bool: pairs whose expert this rank holds."""
    ep = self.route.inner
    return index // (self.num_experts // ep.size) == ep.rank


def keep_the_score_gradient_of_own_experts() -> AbstractContextManager[Any]:
    """A router's gradient has the part of this rank's experts only: transformers 48205."""

    def route(self: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor:
        return ROUTE(self, hidden, index, torch.where(_is_own(self, index), weights, weights.detach()), left_out)

    return patch.object(ExpertDispatch, "_route", route)


def give_slots_of_others_a_gradient() -> AbstractContextManager[Any]:
    """Slots of experts elsewhere count nothing in forward, but in backward they do: transformers 48687."""

    def route(self: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor:
        y = ROUTE(self, hidden, index, weights, left_out)
        slots = torch.where(_is_own(self, index), 0, weights)
        return y + (slots - slots.detach()).sum(-1, keepdim=True) * y.detach()

    return patch.object(ExpertDispatch, "_route", route)


def keep_the_gradients_of_the_step_before() -> AbstractContextManager[Any]:
    """Gradients are added to those of the former step, and norms diverge without ZeRO: DeepSpeed 7839."""
    opened = MainGradView._open
    return patch.object(MainGradView, "_open", lambda view: (opened(view)[0], False))


def keep_the_last_microbatch() -> AbstractContextManager[Any]:
    """Of several backward passes the last one's gradients are kept: DeepSpeed 7967, 7981."""
    add = MainGradView.add_stacked_matmul

    def overwrite(view: MainGradView, left: Tensor, right: Tensor, groups: Any) -> None:
        view.state = GradientState.REDUCED
        add(view, left, right, groups)

    return patch.object(MainGradView, "add_stacked_matmul", overwrite)


def scale_on_every_stage() -> AbstractContextManager[Any]:
    """Each pipeline stage divides the gradient that it gets by the number of microbatches once more: DeepSpeed 8154."""
    backward = RankStage.backward

    def scale(stage: RankStage, outputs: Any, received: Sequence[Tensor], is_last: bool) -> None:
        backward(stage, outputs, tuple(each / ACCUMULATION for each in received), is_last)

    return patch.object(RankStage, "backward", scale)


def leave_replicas_of_experts_alone() -> AbstractContextManager[Any]:
    """Within HSDP those who hold the same experts keep their own sums."""
    start = gradients.start_all_reduce

    def without_experts(x: Tensor, axis: Communicator, **options: Any) -> Pending:
        return Pending() if axis.name == "expert_replica" else start(x, axis, **options)

    return patch.object(gradients, "start_all_reduce", without_experts)


# --- the norm


def _count_experts(buffer: UnitBuffer, values: Tensor, replace: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    counted = COUNTED(buffer, values)
    are_experts = {".experts." in slot.name for slot in buffer.slots}
    assert len(are_experts) == 1, "experts have buffers of their own"
    return replace(counted) if True in are_experts else counted


COUNTED = UnitBuffer.counted_elements


def omit_experts_of_other_tensor_ranks() -> AbstractContextManager[Any]:
    """Experts of all but the first tensor-parallel rank are taken for copies of its own: Megatron-LM 5916."""
    return patch.object(
        UnitBuffer,
        "counted_elements",
        lambda buffer, values: _count_experts(buffer, values, lambda own: own if dist.get_rank() == 0 else []),
    )


def count_one_group_in_the_norm() -> AbstractContextManager[Any]:
    """Of the groups that divide the experts only the first counts its part: Megatron-LM 7530."""
    return patch.object(
        UnitBuffer,
        "counted_elements",
        lambda buffer, values: _count_experts(buffer, values, lambda own: own if dist.get_rank() < 2 else []),
    )


def count_each_group_in_the_norm() -> AbstractContextManager[Any]:
    """Experts count once for each group that holds them: Megatron-LM 7530."""
    return patch.object(
        UnitBuffer, "counted_elements", lambda buffer, values: _count_experts(buffer, values, lambda own: [values])
    )


# --- tokens on their way


def weigh_twice() -> AbstractContextManager[Any]:
    """The receiver weights what its experts give, and so does the sender."""

    def combine(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        return COMBINE(y * weights.flatten()[order].unsqueeze(-1), weights, order)

    return patch.object(route, "combine", combine)


def pair_weights_with_other_experts() -> AbstractContextManager[Any]:
    """A token's weights and its experts are numbered in two ways: transformers 45473."""
    return patch.object(route, "combine", lambda y, weights, order: COMBINE(y, weights.flip(-1), order))


def leave_memory_as_it_was() -> AbstractContextManager[Any]:
    """Pairs that are in no row add what is in memory for them: transformers 48205."""
    add_up = rows._sum_weighted

    def add(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        is_missing = rows._find_rows(order, weights.numel()).view_as(weights) < 0
        return add_up(y, order, weights).masked_fill(is_missing.any(1, keepdim=True), torch.nan)

    return patch.object(rows, "_sum_weighted", add)


def begin_each_buffer_with_the_first_pairs() -> AbstractContextManager[Any]:
    """Padded buffers of all ranks hold the pairs of the first."""

    def pack(self: Hop, pairs: Tensor) -> Tensor:
        place = torch.arange(self.sent[0]).expand(len(self.counts), -1)
        return pairs[place.clamp(max=len(pairs) - 1)].where(place < self.counts.unsqueeze(1), len(pairs)).flatten()

    return patch.object(Hop, "pack", pack)


def take_padding_for_rows() -> AbstractContextManager[Any]:
    """Padding counts as rows of the last expert, each with the numbers of some pair."""
    pack = Hop.pack

    def fill(self: Hop, pairs: Tensor) -> Tensor:
        found = pack(self, pairs)
        return found.where(found < len(pairs), pairs[0])

    return patch.object(Hop, "pack", fill)


def divide_features_for_rows() -> AbstractContextManager[Any]:
    """Under tensor parallelism features are divided instead of rows; as many numbers, so nothing fails: DeepSpeed 8195."""

    def scatter(x: Tensor, axis: Communicator, dim: int) -> Tensor:
        is_hidden = x.shape[-1] == 32
        return x.chunk(axis.size, -1)[axis.rank].reshape(-1, 32) if is_hidden else SCATTER(x, axis, dim)

    return patch.object(dispatch.duals, "scatter", scatter)


def mix_up_counts() -> AbstractContextManager[Any]:
    """A sender's numbers of rows are read in another order of this rank's experts."""
    tell = route.all_to_all

    def mixed(out: Tensor, x: Tensor, axis: Communicator) -> None:
        tell(out, x, axis)
        if axis.name == "ep":
            out.copy_(out.flip(1))

    return patch.object(route, "all_to_all", mixed)


def count_a_duplicate_twice() -> AbstractContextManager[Any]:
    """A row that stands for two experts of a node is added up once for each of them."""
    combine = DispatchedRows._combine

    def twice(self: DispatchedRows) -> Tensor:
        weights, order = self._weighted
        experts = torch.bincount(order // weights.shape[1], minlength=len(weights))
        return combine(self) * experts.unsqueeze(1)

    return patch.object(DispatchedRows, "_combine", twice)


def weigh_on_both_sides() -> AbstractContextManager[Any]:
    """The sender weights a node's sum, which that node has weighted."""
    depart, arrive_back = DispatchedRows.depart, DispatchedRows.arrive_back

    def keep(self: DispatchedRows, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.given = weights
        depart(self, x, ids, weights)

    both = {"depart": keep, "arrive_back": lambda self: arrive_back(self) * self.given[:, :1]}
    return patch.multiple(DispatchedRows, **both)


def weigh_by_another_row() -> AbstractContextManager[Any]:
    """Beside a row stand the weights of its neighbour."""
    pack = rows._pack
    return patch.object(
        rows, "_pack", lambda columns: pack([each.roll(int(number == 1), 0) for number, each in enumerate(columns)])
    )


def send_codes_alone_to_others() -> AbstractContextManager[Any]:
    """A rank's own rows are not rounded, so that results depend on where an expert is."""
    receive = RowExchange.receive

    def keep(self: RowExchange) -> list[Tensor]:
        own, to = sum(self.sent[: self.axis.rank]), sum(self.received[: self.axis.rank])
        rows, *others = receive(self)
        count = self.sent[self.axis.rank]
        if self.codec is not None:
            rows[to : to + count] = self.exact[own : own + count]
        return [rows, *others]

    send = RowExchange.send

    def remember(self: RowExchange, columns: Sequence[Tensor]) -> None:
        self.exact = columns[0].detach()
        send(self, columns)

    return patch.multiple(RowExchange, send=remember, receive=keep)


def round_gradients_that_cross_alone() -> AbstractContextManager[Any]:
    """Where experts are all on one node gradients are exact, as no message needs their codes."""
    return patch.object(route, "round_gradient", lambda y, codec: y)


def read_gradients_by_scales_of_another_row() -> AbstractContextManager[Any]:
    """Scales of the gradients that have crossed are one row off."""
    wait = RowExchange._wait

    def shifted(self: RowExchange, forms: Sequence[Any], codec: BlockCodec | None) -> list[Tensor]:
        if codec is not None and codec is self.gradient_codec and self._message is not None:
            scales, _ = codec.split(self._message, forms[0][0])
            scales.copy_(scales.roll(1, 0))
        return wait(self, forms, codec)

    return patch.object(RowExchange, "_wait", shifted)


def lose_the_gradient_of_weights() -> AbstractContextManager[Any]:
    """The gradient of weights that have crossed stays where it is, and routers learn from their own node alone."""
    receive = RowExchange.receive_gradients
    return patch.object(
        RowExchange,
        "receive_gradients",
        lambda self: [each if number != 1 or each is None else 0 * each for number, each in enumerate(receive(self))],
    )


def combine_with_weights_of_the_other_half() -> AbstractContextManager[Any]:
    """Weights are those of the half that has departed last."""
    pass_on, combine = DispatchedRows.pass_on, DispatchedRows._combine
    last: list[Any] = []

    def keep(self: DispatchedRows) -> None:
        pass_on(self)
        last[:] = [self._weighted]

    def mixed(self: DispatchedRows) -> Tensor:
        self._weighted = last[0]
        return combine(self)

    return patch.multiple(DispatchedRows, pass_on=keep, _combine=mixed)


def join_halves_in_another_order() -> AbstractContextManager[Any]:
    """Each half goes on with what the other's experts gave."""
    join = halves._join
    return patch.object(halves, "_join", lambda first, second: join(second, first))


def count_the_shared_expert_on_every_rank() -> AbstractContextManager[Any]:
    """What a shared expert gives is added once for each tensor-parallel rank."""
    forward = Qwen2MoeMLP.forward
    return patch.object(Qwen2MoeMLP, "forward", lambda mlp, x: 2 * forward(mlp, x))


def case(name: str, dp: int, parallel: Parallel, zero: Zero = Zero(stage=0), **changes: Any) -> Case:  # noqa: B008
    world = dp * parallel.tp * parallel.pp
    recipe = small_recipe("fp64", world, ACCUMULATION, 8, 0.05, zero, parallel)
    return Case(name, family(name), {"": recipe}, {"num_hidden_layers": parallel.pp, **changes})


QWEN2: dict[str, Any] = {"num_experts": 4, "mlp_only_layers": []}
CASES = {
    "two ranks": case("mixtral", 2, Parallel(ep=2)),
    "halves": case("mixtral", 2, Parallel(ep=2, expert_overlap=True)),
    "two nodes": case("mixtral", 4, Parallel(ep=4, expert_hierarchical=2)),
    "codes": case("mixtral", 4, Parallel(ep=4, expert_hierarchical=2, expert_dispatch="fp8")),
    "codes within a node": case("mixtral", 2, Parallel(ep=2, expert_dispatch="fp8")),
    "padded buffers": case("mixtral", 4, Parallel(ep=4, expert_hierarchical=2, expert_padding=4.0)),
    "replicas of experts": case("mixtral", 4, Parallel(ep=2), Zero(stage=2, shard_within=2)),
    "replicated tokens": case("qwen2_moe", 1, Parallel(tp=2, ep=2, sequence=False), **QWEN2),
    "padded tokens": case("mixtral", 1, Parallel(tp=2, ep=2)),
    "two stages": case("mixtral", 2, Parallel(pp=2, ep=2)),
}
GRADIENT, NORM = "gradient, step 1", "gradient norm"
# What is done, where it shows, and the quantity in which it must.
SABOTAGES: tuple[tuple[Sabotage, str, str], ...] = (
    (scale_by_the_ranks_that_share, "two ranks", GRADIENT),
    (keep_the_input_gradient_of_own_experts, "two ranks", GRADIENT),
    (detach_the_weights, "two ranks", GRADIENT),
    (keep_the_score_gradient_of_own_experts, "two ranks", GRADIENT),
    (give_slots_of_others_a_gradient, "two ranks", GRADIENT),
    (keep_the_gradients_of_the_step_before, "two ranks", NORM),
    (keep_the_last_microbatch, "two ranks", GRADIENT),
    (weigh_twice, "two ranks", "loss"),
    (pair_weights_with_other_experts, "two ranks", "loss"),
    (mix_up_counts, "two ranks", "loss"),
    (combine_with_weights_of_the_other_half, "halves", "loss"),
    (join_halves_in_another_order, "halves", "loss"),
    (weigh_twice, "halves", "loss"),
    (count_a_duplicate_twice, "two nodes", "loss"),
    (weigh_on_both_sides, "two nodes", "loss"),
    (weigh_by_another_row, "two nodes", "loss"),
    (lose_the_gradient_of_weights, "two nodes", GRADIENT),
    (send_codes_alone_to_others, "codes", GRADIENT),
    (round_gradients_that_cross_alone, "codes within a node", GRADIENT),
    (read_gradients_by_scales_of_another_row, "codes", GRADIENT),
    (begin_each_buffer_with_the_first_pairs, "padded buffers", "loss"),
    (take_padding_for_rows, "padded buffers", "loss"),
    (leave_replicas_of_experts_alone, "replicas of experts", GRADIENT),
    (count_one_group_in_the_norm, "replicas of experts", NORM),
    (count_each_group_in_the_norm, "replicas of experts", NORM),
    (send_every_copy, "replicated tokens", GRADIENT),
    (omit_experts_of_other_tensor_ranks, "replicated tokens", NORM),
    (divide_features_for_rows, "replicated tokens", "loss"),
    (count_the_shared_expert_on_every_rank, "replicated tokens", "loss"),
    (leave_memory_as_it_was, "padded tokens", GRADIENT),
    (scale_on_every_stage, "two stages", GRADIENT),
)


@pytest.fixture(scope="module")
def errors(pool: RankPool) -> dict[str, Errors]:
    """By case."""
    return {
        label: errors_of(pool, [sabotage for sabotage, at, _ in SABOTAGES if at == label], of)
        for label, of in CASES.items()
    }


@pytest.mark.parametrize("label", CASES)
def test_whole_code_is_within_the_tolerance(errors: dict[str, Errors], label: str) -> None:
    assert max(errors[label]["whole"].values()) < TOLERANCE


@pytest.mark.parametrize(
    ("sabotage", "label", "quantity"), SABOTAGES, ids=[sabotage.__name__ for sabotage, _, _ in SABOTAGES]
)
def test_a_bug_shows(errors: dict[str, Errors], sabotage: Sabotage, label: str, quantity: str) -> None:
    # Not a number is an error, too.
    assert not errors[label][sabotage.__name__][quantity] < VISIBLE
