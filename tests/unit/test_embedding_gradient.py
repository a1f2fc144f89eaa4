"""An embedding's gradient is autograd's, without a table of zeros for every microbatch."""

import pytest
import torch
from torch import nn

from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from framework.model.units import Unit, set_parameter
from framework.parallel.zero.buffer_plan import lifetimes_of
from framework.parallel.zero.buffers import GradientState, MainGradView, make_buffers
from framework.parallel.zero.gradients import write_embedding_gradients
from framework.parallel.zero.plan_buffers import plan_buffers, shard_over_batch
from framework.recipe.schema import Zero

IDS = torch.tensor([[1, 5, 5, 0], [7, 1, 5, 3]])


def grad_view_of(table: nn.Embedding, master: torch.dtype) -> MainGradView:
    """The table's parameter moves into a buffer of one rank."""
    values, axes = (
        table.weight.detach().clone(),
        {name: Communicator(Axis(name, 1, 0)) for name in ("shard", "replica")},
    )
    layouts = shard_over_batch({"weight": Layout(tuple(values.shape))})
    units = [Unit("embedding", ("",), ("weight",))]
    dtypes = {"weight": values.dtype}
    plans = plan_buffers(units, layouts, {"weight": "all"}, dtypes, master, lifetimes_of(Zero(stage=0)), axes)
    (buffer,) = make_buffers(plans)
    buffer.allocate(torch.device("cpu"))
    set_parameter(table, ("weight",), buffer.parameters["weight"])
    table.weight.data.copy_(values)
    return buffer.grad_views["weight"]


@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("master", [torch.float32, torch.float64])
def test_rows_of_all_microbatches_add_up_to_autograds_gradient(padding: int | None, master: torch.dtype) -> None:
    torch.manual_seed(3)
    table, dy = nn.Embedding(9, 4, padding_idx=padding), torch.randn(2, 2, 4, 4)
    expected = torch.autograd.grad([table(IDS), table(IDS)], table.weight, list(dy))[0]
    grad_view = grad_view_of(table, master)
    write_embedding_gradients(table, {"weight": grad_view})
    for each in dy:
        table(IDS).backward(each)
    assert grad_view.is_reached
    torch.testing.assert_close(grad_view.view, expected.to(master), rtol=1e-6, atol=1e-6)


def test_a_backward_that_leaves_weights_for_later_keeps_the_rows_only() -> None:
    table = nn.Embedding(9, 4)
    grad_view = grad_view_of(table, torch.float32)
    write_embedding_gradients(table, {"weight": grad_view})
    dy = torch.randn(2, 4, 4)
    expected = torch.autograd.grad(nn.functional.embedding(IDS, table.weight), table.weight, dy)[0]
    grad_view.deferred = {}
    table(IDS).backward(dy)
    assert grad_view.state is not GradientState.WRITTEN
    (bring,) = grad_view.deferred["embedding"]
    kept = [cell.cell_contents for cell in bring.args[0].__closure__]  # type: ignore[attr-defined]
    assert [tuple(each.shape) for each in kept] == [(8,), (8, 4)]
    grad_view.deferred = None
    bring()
    torch.testing.assert_close(grad_view.view, expected)


def test_tables_with_a_forward_of_their_own_or_a_rule_for_gradients_are_left_alone() -> None:
    for table in (nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4, scale_grad_by_freq=True)):
        write_embedding_gradients(table, {"weight": grad_view_of(table, torch.float32)})
        assert "forward" not in vars(table)
