"""Each private name of torch does, in the installed torch, what the framework calls it for."""

import inspect
import threading
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from framework import torch_private as private


class Seen(private.TorchDispatchMode):
    """Operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def heads(n: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, n, 4, dtype=torch.float64) for _ in range(4)]


def test_attention_on_cpus_gives_the_sum_and_takes_it_for_backward() -> None:
    *qkv, gradient = heads()
    leaves = [x.requires_grad_() for x in qkv]
    with Seen() as seen:
        expected = F.scaled_dot_product_attention(*leaves, is_causal=True)
    out, log_sum = private.flash_cpu(*(x.detach() for x in qkv), 0.0, True, attn_mask=None, scale=None)
    scores = (qkv[0] @ qkv[1].mT / 2).masked_fill(torch.ones(8, 8).triu(1) > 0, -torch.inf)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1))
    found = private.flash_cpu_backward(gradient, *qkv, out, log_sum, 0.0, True, attn_mask=None, scale=None)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, gradient))
    assert any(each in [operator for operator, _ in private.ATTENTIONS] for each in seen.operators)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("n", [8, 300])
def test_attention_on_cpus_shares_heads_of_keys_and_values(n: int, masks: bool) -> None:
    """One of them for two of the queries: a kernel that did not would read and write behind them."""
    q, gradient, k, v = (torch.randn(2, heads, n, 4, dtype=torch.float64) for heads in (4, 4, 2, 2))
    options = {"attn_mask": torch.randn(2, 1, n, n, dtype=torch.float64) if masks else None, "scale": None}
    found, expected = [], []
    for k_, v_, results in ((k, v, found), (*(x.repeat_interleave(2, 1) for x in (k, v)), expected)):
        out, log_sum = private.flash_cpu(q, k_, v_, 0.0, not masks, **options)
        results += [out, *private.flash_cpu_backward(gradient, q, k_, v_, out, log_sum, 0.0, not masks, **options)]
    expected[2:] = [x.unflatten(1, (2, 2)).sum(2) for x in expected[2:]]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("operator", "place"), private.ATTENTIONS, ids=lambda each: str(each).split(".")[-2:][0])
def test_an_attention_has_its_dropout_where_it_is_read(operator: Any, place: int) -> None:
    assert private.schema_of(operator).arguments[place].name == "dropout_p"


@pytest.mark.parametrize("operator", [private.flash, private.flash_backward, private.cudnn, private.cudnn_backward])
def test_attention_on_gpus_takes_what_it_is_given(operator: Any) -> None:
    names = {argument.name for argument in private.schema_of(operator.default).arguments}
    assert {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= names


def test_a_dispatch_mode_sees_casts_and_questions_of_the_host() -> None:
    x = torch.ones(2)
    with Seen() as seen:
        x.to(torch.float64)
        x[0].item()
        with private.without_modes():
            x.exp()
    assert private.TO_COPY in seen.operators
    assert private.ITEM in seen.operators
    assert torch.ops.aten.exp.default not in seen.operators


def test_the_softmax_gradient_is_written_in_place() -> None:
    logits, gradient = (torch.randn(3, 5, dtype=torch.float64) for _ in range(2))
    leaf = logits.requires_grad_()
    logs = F.log_softmax(leaf, -1)
    (expected,) = torch.autograd.grad(logs, leaf, gradient)
    out = logs.detach().clone()
    private.log_softmax_backward_out(gradient, out, -1, torch.float64, out=out)
    torch.testing.assert_close(out, expected)


def test_a_tensor_says_how_often_it_was_written_and_whose_memory_it_has() -> None:
    x = torch.ones(2, 3)
    before, view = private.version_of(x), x.view(6)
    view.add_(1)
    assert private.version_of(x) == private.version_of(view) == before + 1
    assert private.base_of(view) is x
    assert private.base_of(x) is None
    meta = [torch.empty(3, device="meta") for _ in range(2)]
    assert private.storage_number(x) == private.storage_number(view)
    assert private.storage_number(meta[0]) != private.storage_number(meta[1])
    x.untyped_storage().resize_(0)
    assert private.storage_number(x) == private.storage_number(view)


def test_a_wrapper_has_a_shape_and_no_memory() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:  # type: ignore[override]
            return torch.full((), 7.0)

    made = private.make_wrapper(Wrapper, (2, 3), torch.ones(1, dtype=torch.float64))
    assert (tuple(made.shape), made.dtype) == ((2, 3), torch.float64)
    assert (made + 1).item() == 7


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": [1, torch.ones(2)], "b": (3,)}
    leaves, form = private.tree_flatten(tree)
    assert private.tree_leaves(tree) == leaves
    assert private.tree_unflatten(leaves, form) == tree
    assert private.tree_map(str, {"a": (1,)}) == {"a": ("1",)}
    assert private.tree_map_only(int, lambda x: x + 1, [1, "a"]) == [2, "a"]


def test_nodes_are_numbered_by_thread_and_the_count_can_be_moved_on() -> None:
    x = torch.ones(1, requires_grad=True)
    number = private.next_node_number()
    assert private.number_of_node((x * 2).grad_fn) == number
    private.count_nodes_to(number + 10)
    assert private.number_of_node((x * 2).grad_fn) >= number + 10


def test_a_thread_takes_over_the_modes_of_another() -> None:
    packed: list[Tensor] = []

    def compute() -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            torch.ones(1, requires_grad=True).exp()

    with Seen() as seen, saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        modes = private.modes_of_thread()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert torch.ops.aten.exp.default in seen.operators
    assert len(packed) == 1
    assert private.modes_of_thread() == []


def test_autograd_records_within_an_operator() -> None:
    recorded: list[bool] = []

    @torch.library.custom_op("meshwright_test::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        recorded.append((leaf * 2).requires_grad)
        with private.recording():
            recorded.append((leaf * 2).requires_grad)
        return x * 2

    double.register_autograd(lambda ctx, gradient: gradient * 2)
    double(torch.ones(1, requires_grad=True))
    assert recorded == [False, True]


def test_the_compiler_and_the_allocator_take_what_they_are_told() -> None:
    config = private.compiler_config()
    assert config.recompile_limit > 0
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint in (True, False)
    assert "enabled" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters


def test_a_group_is_made_in_a_store_of_its_own_and_gone_with_the_world() -> None:
    limit, stores = timedelta(seconds=20), [dist.HashStore(), dist.HashStore()]
    private.restart_group_names()
    dist.init_process_group("gloo", None, limit, 1, 0, stores[0])
    try:
        assert dist.group.WORLD.group_name == "0"
        group = private.make_group_in_store((0,), 0, "gloo", stores[1], "own", None, limit)
        private.set_group_timeout(timedelta(seconds=7), group)
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        assert (dist.get_process_group_ranks(group), private.carries_cpu_tensors(group)) == ([0], True)
        assert stores[1].num_keys() > 0
        assert all(isinstance(record, bytes) for record in private.dump_flight_records().values())
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_nccl_is_told_to_connect() -> None:
    told: list[torch.device] = []
    backend = SimpleNamespace(eager_connect_single_device=told.append)
    private.connect_eagerly(SimpleNamespace(_get_backend=lambda device: backend), torch.device("cpu"))
    assert told == [torch.device("cpu")]
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    assert nccl is None or hasattr(nccl, "eager_connect_single_device")
