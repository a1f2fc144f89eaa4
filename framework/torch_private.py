"""Private names of torch that the framework calls, because torch has no public name for what they do. All exist in torch 2.11 to
2.13, and `tests/unit/test_torch_private.py` calls each: run it at a version of torch before that version is allowed.

Nothing else of the framework names them (`tests/laws`: `only_torch_private_knows_private_names`). Whoever adds a name says why.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _new_process_group_helper, _set_pg_timeout, _world
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented under this name
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten as tree_flatten  # torch.utils has no public trees
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

aten = torch.ops.aten

# The operators below `F.scaled_dot_product_attention` and `varlen_attn`: these give the log-sum-exp, and come without autograd.
flash = aten._flash_attention_forward
flash_backward = aten._flash_attention_backward
flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn = aten._scaled_dot_product_cudnn_attention
cudnn_backward = aten._scaled_dot_product_cudnn_attention_backward
# The fused attentions that a dispatch mode sees, each with the place of its dropout among the arguments.
ATTENTIONS = (
    (aten._scaled_dot_product_flash_attention.default, 3),
    (flash_cpu.default, 3),
    (aten._scaled_dot_product_efficient_attention.default, 5),
    (cudnn.default, 5),
    (aten._scaled_dot_product_fused_attention_overrideable.default, 4),
)
# A dispatch mode sees `x.to(dtype)` and `x.item()` under these names.
TO_COPY, ITEM = aten._to_copy.default, aten._local_scalar_dense.default
# With `out`, which `F.log_softmax` under autograd has not.
log_softmax_backward_out = aten._log_softmax_backward_data.out


def version_of(x: Tensor) -> int:
    """The number of writes to the tensor's memory, which autograd counts."""
    return x._version


def base_of(x: Tensor) -> Tensor | None:
    """The tensor that x is a view of."""
    return x._base


def storage_number(x: Tensor) -> int:
    """Tells storages apart while they live, also where one has no memory just now, or is on meta: it has no address then."""
    return x.untyped_storage()._cdata


def make_wrapper(kind: Any, shape: Sequence[int], like: Tensor) -> Any:
    """A tensor of a subclass, without memory, with the dtype and device of another."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)


def schema_of(operator: Any) -> Any:
    """The arguments of an operator, and which of them it writes to."""
    return operator._schema


def next_node_number() -> int:
    """The number that the next node of autograd made by this thread gets. Backward runs larger numbers first."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def count_nodes_to(number: int) -> None:
    """Have this thread's next node be numbered no lower. A node that is not used takes a number, 0.1 us."""
    while next_node_number() < number:
        torch._C._functions.UndefinedGrad()


def number_of_node(node: Any) -> int:
    """A node's number among those of its thread."""
    return int(node._sequence_nr())


def modes_of_thread() -> list[AbstractContextManager[Any]]:
    """Modes and hooks of saved tensors that torch keeps for this thread, as contexts that another thread enters."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [*modes, *([] if hooks is None else [saved_tensors_hooks(*hooks)])]


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what is computed."""
    return _disable_current_modes()  # type: ignore[no-any-return]


@contextmanager
def recording() -> Iterator[None]:
    """A context within an operator in which autograd records: torch runs operators below it."""
    keys = torch._C.DispatchKey
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        below = below.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, below), torch.enable_grad():
        yield


def compiler_config() -> Any:
    """Limits and choices of the compiler of layers, for the process: `torch.compile` takes none of these as options."""
    return torch._dynamo.config


def allow_graphs(count: int) -> None:
    """Have torch keep at least so many graphs of one function. By default it gives up after eight: it warns in the log and runs
    the others uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def record_memory_history(is_on: bool) -> None:
    """Have CUDA's allocator note who asked for what, or forget it."""
    torch.cuda.memory._record_memory_history(**({} if is_on else {"enabled": None}))


def dump_memory_history(path: str) -> None:
    """Write what `record_memory_history` has noted."""
    torch.cuda.memory._dump_snapshot(path)


def restart_group_names() -> None:
    """Have torch name the next group as the first of a process."""
    _world.group_count = 0


def make_group_in_store(
    ranks: Sequence[int], rank: int, backend: str, store: dist.Store, name: str, options: Any, timeout: timedelta
) -> Any:
    """A process group whose members meet in a store of its own, which `new_group` lets nobody choose.

    Beside this `new_group` checks its arguments, chooses the name and notes which ranks are members, as here. The helper
    registers a group last of all, so nothing is left of one that fails; `destroy_process_group` takes back all of one that was
    made, and destroying the world takes back all groups.
    """
    place = ranks.index(rank)
    group, _ = _new_process_group_helper(len(ranks), place, list(ranks), backend, store, name, options, timeout)  # type: ignore[arg-type]
    _world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    return group


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Change the time-out of a group that was made with another. `ProcessGroup.set_timeout` knows not all libraries."""
    _set_pg_timeout(timeout, group)


def carries_cpu_tensors(group: Any) -> bool:
    """Whether gloo is part of a group."""
    return torch.device("cpu") in group._device_types


def connect_eagerly(group: Any, device: torch.device) -> None:
    """Have NCCL build a group's communicator, without the rings and trees that a collective would make it build."""
    group._get_backend(device).eager_connect_single_device(device)


def dump_flight_records() -> dict[str, bytes]:
    """Records of the last collectives by torch's flight recorder, by the library that carried them: pickled dicts with sizes,
    states and Python frames. NCCL's, which only a build for GPUs has, was not run on one."""
    names = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
    found = {library: getattr(torch._C._distributed_c10d, name, None) for library, name in names.items()}
    return {library: dump() for library, dump in found.items() if dump is not None}
