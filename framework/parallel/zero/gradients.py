"""Gradients of weights on their way: written by layers into their unit's main gradient, and reduce-scattered while backward
goes on.

    linear      Y = X W^T + b     G += dY^T X
    embedding   Y = W[ids]        G[ids] += dY

Autograd would allocate dY^T X anew in every microbatch, and of an embedding a gradient as large as the whole table, zeros but
for the rows that were looked up; someone would copy or add it into the unit's gradient buffer. Here the layer's `Matmul` adds
to the main gradient, in place where the kernel can accumulate, as Megatron's fused gradient accumulation does. An embedding
adds rows; those of the padding id get none, as in torch. Tables whose forward is not torch's own keep autograd's way.

The gradient of a microbatch is written (first) or added (later) to the main gradient in the master dtype. When backward has
left a unit, its gradient is reduce-scattered over the shard axis, and after the step's last backward this rank's part is
reduce-scattered over the update axis and all-reduced over the axes over which it is partial: law 1, with nothing else to
know.

    n shards, m ranks of another axis, P bytes of a unit's gradient as it travels; this rank sends
    reduce-scatter over shard      (n-1)/n P, after each backward of the unit or once a step (stages 0 and 1)
    reduce-scatter over update     (m-1)/m P/n, once a step
    all-reduce over a partial axis 2 (m-1)/m P/n, once a step
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from framework.comm.algorithms import ExposedCommunication, Pending
from framework.comm.collectives import start_all_reduce, start_reduce_scatter
from framework.comm.communicator import Communicator
from framework.mesh.topology import SHARING_AXES
from framework.model.adapters import has_adapter
from framework.model.matmul import Matmul, MatmulLinear
from framework.model.opaque_linear import linear
from framework.parallel.zero.buffer_plan import Slot
from framework.parallel.zero.buffers import DeferredGradients, GradientState, MainGradView, UnitBuffer


class _DirectLinear(torch.autograd.Function):
    """x: [..., K] -> [..., N]. `tick` stands for the weight in autograd's graph (`Matmul.graph_input`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tick: Tensor, bias: Tensor | None, matmul: Matmul) -> Tensor:
        ctx.matmul = matmul = matmul.begin(x)
        matmul.save(ctx, x)
        # No view, which a model could not write to in place (roc_bert's embedding).
        return matmul.compute(matmul.forward, x, bias).detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,), matmul, needs = ctx.saved_tensors, ctx.matmul, ctx.needs_input_grad
        dx = matmul.input_gradient(dy) if needs[0] else None
        matmul.weight_gradient(x, dy)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if needs[2] else None
        return dx, None, db, None


def write_gradients_directly(
    model: nn.Module,
    grad_views: Mapping[str, MainGradView],
    make_matmul: Callable[[nn.Module, bool], Matmul] = Matmul,
    adapt: Callable[[nn.Module, Matmul], Matmul] = lambda module, matmul: matmul,
) -> dict[nn.Module, Matmul]:
    """Give each stock linear layer (torch's, or GPT-2's transposed Conv1D) of the model the forward above, and the matmuls of all
    of them their main gradient, [N, K] or transposed, in the master dtype. Results are those of autograd. Returns the matmuls.

    make_matmul: from a module, and whether its weight is transposed. adapt: from a module and these, the matmuls with its
    adapter, which has main gradients of its own.
    """
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    matmuls: dict[nn.Module, Matmul] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or not (
            id(module.weight) in by_parameter or has_adapter(module)
        ):
            if isinstance(module, MatmulLinear):
                module.matmul.give_number()
            continue
        if isinstance(module, MatmulLinear):
            matmul = module.matmul = adapt(module, make_matmul(module, module.matmul.is_transposed))
        # Exactly torch's and transformers' own, a tied head among them: a subclass may compute something else with it;
        # those that have an adapter do not (`find_targets`).
        elif type(module) in (nn.Linear, Conv1D) or has_adapter(module):
            matmul = adapt(module, make_matmul(module, isinstance(module, Conv1D)))
            module.forward = _direct_forward(module, matmul, path.rpartition(".")[2])  # type: ignore[method-assign]
        else:
            continue
        if id(module.weight) in by_parameter:
            matmul.write_gradient_to(by_parameter[id(module.weight)])
        matmuls[module] = matmul
    return matmuls


def _direct_forward(module: Any, matmul: Matmul, operation: str) -> Callable[[Tensor], Tensor]:
    # Only the shape is read: the weight's memory may have been freed.
    num_outputs = module.weight.shape[1 if matmul.is_transposed else 0]

    def forward(x: Tensor) -> Tensor:
        # The compiler cannot trace a write into a buffer that is not its own: it would break its graph here.
        if torch.compiler.is_compiling():
            return linear(x, matmul, module.bias, num_outputs, operation)
        return _DirectLinear.apply(x, matmul.tick, module.bias, matmul)

    return forward


class _DirectLookup(torch.autograd.Function):
    """ids: [..., S] -> [..., S, D]. `tick` stands for the weight in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tick: Tensor, grad_view: MainGradView, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.grad_view, ctx.padding = grad_view, padding
        return F.embedding(ids, grad_view.parameter.data)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            # Zeros are added rather than rows left out: to know which they are the host would have to wait for the device.
            dy = dy.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        ctx.grad_view.add_rows(ids.flatten(), dy.flatten(0, -2))
        return None, None, None, None


def write_embedding_gradients(
    model: nn.Module, grad_views: Mapping[str, MainGradView], compiled: Collection[nn.Module] = ()
) -> None:
    """Give each plain embedding of the model whose weight, [V, D], is trained the forward above. Results are those of autograd,
    to which the modules within compiled layers are left."""
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    for module in (each for each in model.modules() if each not in compiled):
        if type(module) is nn.Embedding and id(module.weight) in by_parameter and _is_plain(module):
            module.forward = _direct_lookup(module, by_parameter[id(module.weight)])  # type: ignore[method-assign]


def _is_plain(embedding: nn.Embedding) -> bool:
    # A forward of its own is tensor parallelism's, which looks up in a part of the vocabulary.
    return not (
        "forward" in vars(embedding)
        or embedding.max_norm is not None
        or embedding.scale_grad_by_freq
        or embedding.sparse
    )


def _direct_lookup(embedding: nn.Embedding, grad_view: MainGradView):
    tick = torch.zeros((), device=grad_view.parameter.device, requires_grad=True)

    def forward(ids: Tensor) -> Tensor:
        return _DirectLookup.apply(ids, tick, grad_view, embedding.padding_idx)

    return forward


# Full gradients that may be under way to their shards while backward fills the next one. With two, a reduction may take as
# long as the backward of a unit and a half before anyone waits. FSDP2 allows one unless told otherwise.
REDUCTIONS_IN_FLIGHT = 2


@dataclass(frozen=True)
class Reduction:
    """A reduce-scatter under way: from the full gradient into `part`, which is `summed` itself or a scratch to be added. It holds
    their memory: until the wait the communication stream, or the peer that reads from this rank, uses both."""

    buffer: UnitBuffer
    pending: Pending
    full: Tensor
    part: Tensor


class GradientSync:
    """The main gradients of one stage through a step: start_step, then for each microbatch start_backward, (gradients arrive),
    reduce of each unit from the last to the first, then finish.

    A backward may come in two halves: start_input_backward, end_input_backward, and at any time later backward_weights.
    reduce_dtype: the dtype in which ranks send, but codes; sums are in that of the buffers. exposed: what waits for collectives.
    grad_views: every trained parameter, in an order that is equal on all ranks. is_last_backward: as `start_backward` was told.
    """

    def __init__(self, buffers: Sequence[UnitBuffer], exposed: ExposedCommunication, reduce_dtype: torch.dtype):
        self.reduce_dtype = reduce_dtype
        self.buffers = [buffer for buffer in reversed(buffers) if buffer.is_trained]
        self.grad_views: list[tuple[UnitBuffer, Slot, MainGradView]] = [
            (buffer, slot, buffer.grad_views[slot.name]) for buffer in self.buffers for slot in buffer.slots
        ]
        self._exposed = exposed
        self._of_unit: dict[str, list[UnitBuffer]] = {}
        for buffer in self.buffers:
            self._of_unit.setdefault(buffer.unit, []).append(buffer)
        self.is_last_backward = False
        self._deferred: DeferredGradients | None = None
        self._has_reduced: set[UnitBuffer] = set()
        self._reductions: deque[Reduction] = deque()
        # The sum under way of each buffer, and those that follow it.
        self._replica_sums: list[tuple[Pending, Iterator[Pending], UnitBuffer]] = []
        self._shared: list[UnitBuffer] = []
        for _, _, grad_view in self.grad_views:
            # Weak: Python's collector does not see what autograd's hooks hold. A cycle through one would keep the run for
            # ever, with its memory and the threads of its process groups.
            grad_view.parameter.register_post_accumulate_grad_hook(partial(_collect, ref(grad_view)))

    def start_step(self) -> None:
        """Forget the former step's gradients."""
        for _, _, grad_view in self.grad_views:
            grad_view.state = GradientState.UNREACHED
        self._has_reduced = set()

    def start_backward(self, is_last: bool) -> None:
        """Announce the backward of a microbatch, and whether it is the step's last."""
        # Reductions of the former backward have had a whole forward's time, and their memory is needed again. The wait
        # comes before the flag: a reduction of the former backward is not the unit's last, so no sum over replicas may follow.
        self.wait_for_reductions()
        self.is_last_backward = is_last
        for buffer in self.buffers:
            buffer.is_complete = False

    def start_input_backward(self) -> None:
        """Announce a backward that computes the gradients of activations and leaves those of weights for later."""
        self._deferred = {}
        for _, _, grad_view in self.grad_views:
            grad_view.deferred = self._deferred

    def end_input_backward(self) -> DeferredGradients:
        """The calls that it has left: with the factors of linear layers' matmuls, and such gradients as came with it anyway."""
        deferred, self._deferred = self._deferred, None
        assert deferred is not None, "no input backward was started"
        for _, _, grad_view in self.grad_views:
            grad_view.deferred = None
        return deferred

    @torch.no_grad()
    def backward_weights(self, deferred: DeferredGradients, is_last: bool) -> None:
        """Compute the rest of that backward: each unit's gradients, from the last unit to the first, and its reduction."""
        self.start_backward(is_last)
        for unit in self._of_unit:
            # Popped, so that a unit's activations and output gradients are freed before the next unit's are used.
            for add in deferred.pop(unit, ()):
                add()
            self.reduce(unit)

    def reduce(self, unit: str) -> None:
        """Start the unit's reduction, because backward has left it: no gradient of this microbatch may come any more."""
        if self._deferred is not None:
            return  # its weight gradients are still to come
        for buffer in self._of_unit.get(unit, ()):
            buffer.is_complete = True
            if self.is_last_backward or not buffer.plan.lifetimes.keeps_gradients:
                self._reduce(buffer)

    def finish(self) -> None:
        """Wait until `reduced` of every buffer holds the sum over all microbatches and the ranks of its stage."""
        self.wait_for_reductions()
        while self._replica_sums:
            # All units' sums over one axis are waited for together, then all are sent over the next: one after the other
            # would leave the network idle while each unit's answer comes back.
            self._exposed.wait([pending for pending, _, _ in self._replica_sums])
            sums, self._replica_sums = self._replica_sums, []
            for _, rest, buffer in sums:
                self._sum_next(rest, buffer)

    def wait_for_reductions(self) -> None:
        """Wait for the reductions under way, and give their memory back."""
        while self._reductions:
            self._wait_for_oldest_reduction()

    def _reduce(self, buffer: UnitBuffer) -> None:
        """Start the reduce-scatter of a full gradient, [numel_padded] to [numel_part], over the shard axis."""
        buffer.open_gradient()
        for grad_view in buffer.grad_views.values():
            if grad_view.state is not GradientState.WRITTEN:
                # New memory holds anything. This rank takes part even if nothing here was written: others' data may have
                # reached the parameter, and they wait in the same collective.
                grad_view.view.zero_()
        if buffer.plan.dtypes.reduced is not None:
            _clear_padding(buffer)
        # Sent as it is, padding needs no zeros: nobody counts it, the optimizer never sees it, and it reaches no other element.
        shard, summed = buffer.plan.axes.shard, buffer.summed
        # A later microbatch's sum must not overwrite the former ones': it lands in a scratch and is added when it is there.
        is_first = buffer not in self._has_reduced
        part = summed if is_first else torch.empty_like(summed)
        self._has_reduced.add(buffer)
        full, wire = buffer.close_gradient(), buffer.plan.dtypes.reduce_wire(shard, self.reduce_dtype)
        pending = start_reduce_scatter(part, full, shard, f"gradient of {buffer.unit}", wire)
        self._reductions.append(Reduction(buffer, pending, full, part))
        # With one shard there is nothing to wait for, so its memory goes at once.
        while self._reductions and (len(self._reductions) > REDUCTIONS_IN_FLIGHT or shard.size == 1):
            self._wait_for_oldest_reduction()

    def _wait_for_oldest_reduction(self) -> None:
        """Wait for the oldest reduction; its part is then complete for this microbatch. Oldest first on all ranks: what a wait
        starts next, they must start in one order."""
        # Its full gradient goes with it, and torch's allocator has that memory for the next unit's.
        reduction = self._reductions.popleft()
        buffer = reduction.buffer
        self._exposed.wait([reduction.pending])
        if reduction.part is not buffer.summed:
            buffer.summed.add_(reduction.part)
        # Once a step and not for each microbatch: a sum over replicas of a sum over microbatches, and 1/k of the bytes.
        if self.is_last_backward:
            self._sum_next(self._sum_replicas(buffer), buffer)

    def _sum_next(self, sums: Iterator[Pending], buffer: UnitBuffer) -> None:
        """Start the next of a buffer's sums over replicas; after the last, the way to where its master lives."""
        pending = next(sums, None)
        if pending is not None:
            self._replica_sums.append((pending, sums, buffer))
        elif _sharing_axis(buffer) is not None:
            self._shared.append(buffer)
        else:
            buffer.start_delivery()

    def start_shared(self, buffer: UnitBuffer) -> Pending:
        """Start the sum of a buffer over the stages that share its parameters, [numel_owned]."""
        axis = _sharing_axis(buffer)
        assert axis is not None, f"{buffer.unit} is shared with no other stage"
        wire = buffer.plan.dtypes.reduce_wire(axis, self.reduce_dtype)
        # Use a name that all stages know: their units have different names.
        return start_all_reduce(buffer.reduced, axis, label=f"gradient of {buffer.slots[0].name}", wire=wire)

    def take_shared(self) -> list[UnitBuffer]:
        """The buffers that `sum_over_stages` has yet to sum."""
        shared, self._shared = self._shared, []
        return shared

    def _sum_replicas(self, buffer: UnitBuffer) -> Iterator[Pending]:
        """The sums that a part still needs, [numel_part] to [numel_owned], one after the other: each reads what the one before
        has written, so it may be started only when that has been waited for."""
        axes, label = buffer.plan.axes, f"gradient of {buffer.unit}"
        wire = partial(buffer.plan.dtypes.reduce_wire, reduce_dtype=self.reduce_dtype)
        if axes.update.size > 1:
            yield start_reduce_scatter(buffer.reduced, buffer.summed, axes.update, label, wire(axes.update))
        for axis in (axis for axis in axes.partial if axis.size > 1 and axis.name not in SHARING_AXES):
            yield start_all_reduce(buffer.reduced, axis, label=label, wire=wire(axis))


def _sharing_axis(buffer: UnitBuffer) -> Communicator | None:
    """The axis over whose ranks stages share the buffer's parameters; None where there is none."""
    return next((axis for axis in buffer.plan.axes.partial if axis.size > 1 and axis.name in SHARING_AXES), None)


def sum_over_stages(stages: Sequence[GradientSync], exposed: ExposedCommunication) -> None:
    """Sum the gradients of what stages share, when all of this rank's are finished.

    Behind all messages of the pipeline: over NCCL these may share a communicator, which runs operations in turn, and the first
    stage waits for a gradient that would be queued behind a sum. By name, because stages come to what they share in other orders.
    """
    shared = [(buffer, stage) for stage in stages for buffer in stage.take_shared()]
    shared.sort(key=lambda each: each[0].slots[0].name)
    exposed.wait([stage.start_shared(buffer) for buffer, stage in shared])
    for buffer, _ in shared:
        buffer.start_delivery()


def _clear_padding(buffer: UnitBuffer) -> None:
    """Zero the padding of a full gradient: codes of its block would be as coarse as what another unit has left there."""
    buffer.gradient[buffer.plan.numel :].zero_()


def _collect(weak: ref[MainGradView], parameter: Tensor) -> None:
    """Take over what autograd has accumulated in a backward."""
    grad_view, gradient = weak(), parameter.grad
    # Else autograd would add the next microbatch's in the compute dtype, and keep a second copy of every gradient.
    parameter.grad = None
    assert grad_view is not None and gradient is not None, tuple(parameter.shape)  # noqa: PT018
    grad_view.add(gradient)
