"""One flat buffer per unit: its parameters are views of it, its gradients views of a second one.

    compute   [ span of group A | span of group B | frozen ]      what forward and backward read
    master    [ span of group A | span of group B ]               what the optimizer updates; the same memory if dtypes agree
    gradient  [ span of group A | span of group B | touched ]     one flag per trained parameter rides along in the reduction

Parameters of one optimizer group lie side by side, so the optimizer is one fused call on a few flat tensors. A rank owns
an equal interval of the buffer: what it owns is what it counts in the gradient norm and writes to a checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from framework.mesh.axis import Axis
from framework.mesh.layout import Layout
from framework.model.plan import Unit
from framework.model.products import linear_product

FROZEN = ""


@dataclass(frozen=True)
class Slot:
    """A parameter's place: elements [start, stop) of its unit's buffer. `group` is the optimizer group, FROZEN for none."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    group: str

    @property
    def is_trained(self) -> bool:
        return self.group != FROZEN


class GradientPlace:
    """Where one parameter's gradient is collected: a view of its unit's gradient buffer, written first, then added to.

    `tick` stands for the parameter in autograd's graph where a layer writes its gradient here itself. `sources`: the leaves
    of autograd's graph that have to finish before the gradient of a backward is complete.
    """

    def __init__(self, parameter: nn.Parameter, view: Tensor):
        self.parameter = parameter
        self.view = view
        self.tick = nn.Parameter(torch.zeros((), device=view.device))
        self.sources: tuple[nn.Parameter, ...] = (parameter,)
        self.touched = False

    def add(self, gradient: Tensor) -> None:
        """Add a finished gradient, cast to the reduce dtype."""
        if self.touched:
            self.view.add_(gradient)
        else:
            self.view.copy_(gradient)
        self.touched = True

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right^T. left: [m, k], right: [n, k], any strides; the place: [m, n]."""
        self.add(linear_product(left, right))


class UnitBuffer:
    """The parameters of one unit that share a compute dtype. Plans without memory; `allocate` owns it."""

    def __init__(
        self, name: str, slots: tuple[Slot, ...], compute_dtype: torch.dtype, master_dtype: torch.dtype, axis: Axis
    ):
        self.name = name
        self.slots = slots
        self.trained = tuple(slot for slot in slots if slot.is_trained)
        self.numel = slots[-1].stop
        self.numel_trained = self.trained[-1].stop if self.trained else 0
        self.compute_dtype, self.master_dtype = compute_dtype, master_dtype
        self.owned = (axis.rank * self.numel // axis.size, (axis.rank + 1) * self.numel // axis.size)
        self.axis = axis
        self.compute = self.master = self.gradient = torch.empty(0)
        self.parameters: dict[str, nn.Parameter] = {}
        self.places: dict[str, GradientPlace] = {}

    def allocate(self, device: torch.device) -> None:
        """Memory for parameters, gradients and the master copy; parameters become views of it."""
        self.compute = torch.empty(self.numel, dtype=self.compute_dtype, device=device)
        trained = self.compute[: self.numel_trained]
        same = self.compute_dtype == self.master_dtype
        self.master = trained if same else torch.empty_like(trained, dtype=self.master_dtype)
        self.gradient = torch.zeros(self.numel_trained + len(self.trained), dtype=self.master_dtype, device=device)
        for slot in self.slots:
            view = self.compute[slot.start : slot.stop].view(slot.shape)
            self.parameters[slot.name] = nn.Parameter(view, requires_grad=slot.is_trained)
        for slot in self.trained:
            place = self.gradient_of(slot).view(slot.shape)
            self.places[slot.name] = GradientPlace(self.parameters[slot.name], place)

    def values(self, slot: Slot) -> Tensor:
        """The flat values of a slot that are the truth: master for trained ones, compute for frozen ones."""
        return (self.master if slot.is_trained else self.compute)[slot.start : slot.stop]

    def gradient_of(self, slot: Slot) -> Tensor:
        """The slot's gradient, flat, in the master dtype."""
        return self.gradient[slot.start : slot.stop]

    def touched_flag(self, slot: Slot) -> Tensor:
        """Scalar > 0 after the reduction if any rank's backward reached the parameter in this step."""
        return self.gradient[self.numel_trained + self.trained.index(slot)]

    def publish(self) -> None:
        """Cast the updated master to the compute dtype; nothing to do where they are the same memory."""
        if self.compute_dtype != self.master_dtype:
            self.compute[: self.numel_trained].copy_(self.master)

    def spans(self) -> dict[str, tuple[int, int]]:
        """[start, stop) of each optimizer group."""
        spans: dict[str, tuple[int, int]] = {}
        for slot in self.trained:
            start, _ = spans.get(slot.group, (slot.start, slot.stop))
            spans[slot.group] = (start, slot.stop)
        return spans

    @property
    def owned_trained(self) -> tuple[int, int]:
        """[start, stop) of the trained elements that this rank owns."""
        return min(self.owned[0], self.numel_trained), min(self.owned[1], self.numel_trained)

    def layout(self, slot: Slot) -> Layout:
        """Replicated over the axis and partial before its reduction; the interval is this rank's share of the slot."""
        start = min(max(self.owned[0] - slot.start, 0), slot.stop - slot.start)
        stop = min(max(self.owned[1] - slot.start, 0), slot.stop - slot.start)
        axes = (self.axis.name,)
        return Layout(tuple(slot.shape), replicated=axes, partial=axes, interval=(start, stop))


def plan_buffers(
    units: Iterable[Unit],
    shapes: Mapping[str, torch.Size],
    groups: Mapping[str, str],
    compute_dtypes: Mapping[str, torch.dtype],
    master_dtype: torch.dtype,
    axis: Axis,
) -> list[UnitBuffer]:
    """Buffers in order of computation, one per unit and compute dtype. `groups`: optimizer group by parameter name, FROZEN if
    it is not trained; groups keep the order in which they first appear in `groups`, frozen parameters come last."""
    order = {group: index for index, group in enumerate(dict.fromkeys(groups.values()))}
    order[FROZEN] = len(order)
    buffers = []
    for unit in units:
        for dtype in dict.fromkeys(compute_dtypes[name] for name in unit.parameters):
            names = [name for name in unit.parameters if compute_dtypes[name] == dtype]
            slots, end = [], 0
            for name in sorted(names, key=lambda name: order[groups[name]]):
                slots.append(Slot(name, shapes[name], end, end + shapes[name].numel(), groups[name]))
                end = slots[-1].stop
            buffers.append(UnitBuffer(unit.name, tuple(slots), dtype, master_dtype, axis))
    return buffers
