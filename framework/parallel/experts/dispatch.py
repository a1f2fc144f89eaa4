"""Dispatch: what a rank's experts module computes where experts are on several ranks, and shared experts beside it.

    plan        the numbers of rows for nodes, ranks and experts                        all-to-all, even
    depart      each token to the nodes of its experts, from there to their ranks       all-to-all, uneven, over either hop
    compute     two stacked matmuls on the rows in the order of this rank's experts
    return      the results to the node's rank, which weights and adds them; the node's sums to the tokens' ranks

`route` has the hops; on one node the first is the identity, and the sender of rows weights what comes back.

Every rank takes part in every step however few rows it has: ranks wait for one another in forward and in backward.

Shared experts are computed while the routed experts' rows travel, and with `parallel.expert_overlap` the other half of the
microbatch (`halves`). A mixture whose code asks for its shared experts behind the routed ones, and for those of its own input,
gets what was computed as soon as rows had departed. A mixture that asks for them in front computes them where they stand. Which
of the two it does is found by running its code on meta.

The rows that a rank routes are its own tokens. Where all ranks of `tp` hold the same ones (tensor parallelism without sequence
parallelism, whole experts), each routes an equal interval of them, and the results are gathered.

    T rows of hidden states, k experts per token, E experts, e of them on this rank, H features, R rows received
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.comm import duals
from framework.comm.transfer import upload_values
from framework.model.experts import Capacity, ExpertsForm, StockForm
from framework.model.kept_outputs import EXPERTS, KeepsOutputs, KeptOutputs
from framework.model.matmul import GradView, RowGroups, StackedMatmul
from framework.model.opaque import OpaqueExperts
from framework.model.routers import RoutedTokens
from framework.parallel.experts.route import ExpertRoute
from framework.torch_private import storage_number, version_of


class LocalExperts:
    """The experts that this rank holds, [e, ...] of every weight, on rows in the order of the experts. keeps_tokens: whether this
    rank gives back tokens that are routed to themselves: where experts are sliced, one of those whose results are summed."""

    def __init__(self, experts: nn.Module, form: ExpertsForm, keeps_tokens: bool):
        self.experts, self.form = experts, form
        self.keeps_tokens = keeps_tokens and form.has_identity
        self.first = StackedMatmul(experts, form.first, form.is_transposed)
        self.last = StackedMatmul(experts, form.last, form.is_transposed)

    @property
    def matmuls(self) -> tuple[StackedMatmul, StackedMatmul]:
        return self.first, self.last

    def compute(self, x: Tensor, ids: Tensor, groups: RowGroups, between: Callable[[], None]) -> Tensor:
        """The output of each row's expert.  x: [R, H] -> [R, H]; ids: [R] int64, the expert's number among this rank's.
        between: called between its two matmuls."""
        # longcat_flash's first weight has matrices behind those of its experts, which no row meets.
        y = self._add_bias(self.first(x, groups.padded(len(self.first.weight))), self.form.first, ids)
        between()
        y = self._add_bias(self.last(self.form.activate(self.experts, y), groups), self.form.last, ids)
        # Muse-Spark normalises what an expert gives, before it is weighted.
        return self.experts.post_expert_norm(y) if getattr(self.experts, "has_post_expert_norm", False) else y  # type: ignore[operator]

    def _add_bias(self, y: Tensor, name: str, ids: Tensor) -> Tensor:
        # Through the module: while it is sliced over `tp`, it lends a part of its bias.
        bias = getattr(self.experts, f"{name}_bias", None)
        # Indexed, not selected: on a GPU the gradient of that adds rows in a fixed order, and in more than their own dtype.
        return y if bias is None else y + bias[ids]


class StockExperts:
    """The experts that this rank holds, on rows in the order of the experts, by their family's own code."""

    matmuls: tuple[StackedMatmul, ...] = ()
    keeps_tokens = False

    def __init__(self, experts: nn.Module, form: StockForm):
        self.experts, self.form, self.forward = experts, form, experts.forward

    def compute(self, x: Tensor, ids: Tensor, groups: RowGroups, between: Callable[[], None]) -> Tensor:
        """`LocalExperts.compute`: [R, H] -> [R, H']."""
        if self.form.is_grouped:
            out: Tensor = self.forward(x, list(groups.counts))
        else:
            # Without a row the family's code is no part of autograd's graph, and in backward other ranks would wait for this one.
            missing = 0 if len(x) else 1
            rows, chosen = F.pad(x, (0, 0, 0, missing)), F.pad(ids, (0, missing)).unsqueeze(1)
            out = self.forward(rows, chosen, rows.new_ones(chosen.shape)).view_as(rows)[: len(x)]
        between()
        return out


class ExpertDispatch:
    """The forward of one module of stacked experts.

    num_experts: of the layer. given: the rows that the module is given. shared: None where none can be computed meanwhile.
    capacity: None where nothing is dropped. end_turn: called where rows have departed and something else may compute.
    """

    def __init__(
        self,
        local: LocalExperts | StockExperts,
        num_experts: int,
        route: ExpertRoute,
        given: RoutedTokens,
        shared: "SharedExperts | None" = None,
        capacity: Capacity | None = None,
    ):
        self.local, self.num_experts, self.route, self.given = local, num_experts, route, given
        self.shared, self.capacity = shared, capacity
        self.report_dropped: Callable[[Tensor], None] = _do_nothing
        self.end_turn: Callable[[], None] = _do_nothing
        self.kept = KeptOutputs()
        # Rows are spread and not kept, but for those that are routed to themselves.
        self.opaque = OpaqueExperts(local.experts, self._dispatch, EXPERTS, local.form.has_identity)

    def keep_outputs(self, kept: KeptOutputs, _operation: str) -> None:
        """From now on the layer is recomputed in backward. What finds no room is a choice, which is always kept."""
        self.kept = kept

    def __call__(self, hidden_states: Tensor, top_k_index: Any = None, top_k_weights: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], as the stock module with all experts; index and weights: [T, k], of the layer's E experts. Without
        weights rows are sorted by expert: `top_k_index` of each, or equally many, llama4's, [E * T, H]."""
        rows = hidden_states.flatten(0, -2)  # dbrx' are [B, S, H]
        if top_k_index is None or top_k_weights is None:
            top_k_index = _find_experts_of_rows(rows, self.num_experts, top_k_index)
            top_k_weights = rows.new_ones(len(top_k_index), 1)
        out = self.opaque(rows, top_k_index, top_k_weights)
        return out.reshape(*hidden_states.shape[:-1], out.shape[-1])  # a graph would end at `unflatten`

    def _dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        left_out = self._find_left_out(hidden_states, top_k_index, top_k_weights)
        route = self._route_interval if self.given.are_shared_out else self._route
        out = route(hidden_states, top_k_index, top_k_weights, left_out)
        if not self.local.keeps_tokens:
            return out
        # A token that is routed to itself needs no expert: it comes back by its weight, with the gradient of both.
        kept = top_k_weights.masked_fill(top_k_index < self.num_experts, 0.0).sum(-1, keepdim=True)
        return out + (hidden_states * kept).to(out.dtype)

    def _route_interval(self, hidden: Tensor, index: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor:
        """Route rows [T, H] that all ranks of `tp` are given alike: each sends an interval, filled up to equal lengths."""
        tp, num_rows = self.given.copies, hidden.shape[0]
        missing = -num_rows % tp.size
        if missing and left_out is None:
            left_out = torch.zeros_like(index, dtype=torch.bool)
        own, own_weights = (duals.scatter(_fill_up(x, missing), tp, 0) for x in (hidden, weights))
        # Indices and choices have no gradient, so each rank cuts its own.
        own_index = _fill_up(index, missing).chunk(tp.size)[tp.rank]
        own_left_out = None if left_out is None else _fill_up(left_out, missing, True).chunk(tp.size)[tp.rank]
        return duals.join(self._route(own, own_index, own_weights, own_left_out), tp, 0)[:num_rows]

    def _find_left_out(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
        """[T, k] bool: pairs that are sent to nobody; None where all are sent."""
        masks = []
        # Sorted rows are no tokens of sequences: padding travels with them.
        if self.given.has_padding and not self.local.form.is_grouped:
            masks.append(self.given.is_padding(index))
        if self.local.form.has_identity:
            masks.append(index >= self.num_experts)
        if self.local.form.is_expert_major:
            # llama4's rows of tokens that were not routed to the expert.
            masks.append(~hidden.detach().any(-1, keepdim=True))
        if self.capacity is not None:
            # Weights that are computed again may differ in their last bit, and another pair would find no room.
            dropped = self.kept.compute_once(partial(self._find_dropped, self.capacity, index, weights.detach()))
            self.report_dropped(dropped.sum())
            masks.append(dropped)
        return reduce(torch.logical_or, masks).expand_as(index) if masks else None

    def _find_dropped(self, capacity: Capacity, index: Tensor, weights: Tensor) -> Tensor:
        """[T, k] bool: this rank's pairs that find no room, of whole sequences, which all who have a part of them gather."""
        return self.given.own(capacity.find_dropped(self.given.join(index), self.given.join(weights), self.num_experts))

    def _count_most(self, tokens: int, top_k: int) -> int | None:
        """Pairs of so many tokens that the experts of one rank take at most; None without a capacity, for stock experts, that ask
        for numbers of rows, and for parts of sequences: all of a part may be for one expert, and its capacity of the whole is no
        bound worth its bytes."""
        given, num_ranks = self.given, self.route.outer.size * self.route.inner.size
        is_stock = isinstance(self.local, StockExperts)
        if self.capacity is None or is_stock or given.over.size > 1 or given.are_shared_out:
            return None
        taken = self.capacity.room(given.slices.context, top_k, self.num_experts)
        return taken * (tokens // given.rows) * (self.num_experts // num_ranks)

    def _route(self, hidden: Tensor, index: Tensor, weights: Tensor, left_out: Tensor | None) -> Tensor:
        """Send rows to their experts and combine the outputs. hidden: [T, H] -> [T, H]; index, weights: [T, k]; left_out: [T, k]
        bool, pairs that are sent to nobody; None: there are none."""
        ids = index if left_out is None else index.masked_fill(left_out, self.num_experts)
        if self.route.padding is not None:
            # Tokens are NaN behind a layer that had no room: where they would go tells nothing of the room that is needed.
            ids = ids.masked_fill(weights.isnan(), self.num_experts)
        rows = self.route.plan(ids, self.num_experts, self._count_most(*ids.shape))
        rows.depart(hidden, ids, weights)
        if self.shared is not None:
            self.shared.compute_ahead()
        end_turn = self.end_turn
        # Over two hops a turn more in each direction, and one within the experts: each hop needs something to travel under.
        end_inner = end_turn if self.route.has_two_hops else _do_nothing
        end_turn()
        rows.pass_on()
        end_inner()
        rows.depart_back(self.local.compute(rows.arrive(), rows.plan.ids, rows.plan.groups, between=end_inner))
        end_inner()
        rows.cross_back()
        end_turn()
        return rows.arrive_back()


def _fill_up(x: Tensor, missing: int, value: bool | int = 0) -> Tensor:
    """x: [T, n] with so many rows of `value` behind it."""
    return F.pad(x, (0, 0, 0, missing), value=value)


def _find_experts_of_rows(rows: Tensor, num_experts: int, counts: Any) -> Tensor:
    """[R, 1], the expert of each row. counts: rows of each expert; None: as many of each, llama4's. It gives every expert every
    token, times its score: one that was not sent there is a row of zeros, whose result and gradient are zeros, too, so it may
    stay at home."""
    experts = torch.arange(num_experts, device=rows.device)
    if counts is None:
        return experts.repeat_interleave(len(rows) // num_experts).unsqueeze(1)
    counts = upload_values(counts, torch.int64, rows.device)
    return experts.repeat_interleave(counts, output_size=len(rows)).unsqueeze(1)


def _do_nothing(*_: Any) -> None:
    pass


def find_dispatches(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertDispatch]]:
    """The modules of experts that dispatch, with their names."""
    found = ((name, module, vars(module).get("dispatch")) for name, module in model.named_modules())
    return (each for each in found if isinstance(each[2], ExpertDispatch))


def report_dropped(model: nn.Module, report: Callable[[nn.Module, Tensor], None]) -> None:
    """Have every module of experts with a capacity report how many pairs it drops in a forward: `report(module, scalar)`."""
    for _, module, dispatch in find_dispatches(model):
        dispatch.report_dropped = partial(report, module)


def find_needed_padding(model: nn.Module) -> list[Tensor]:
    """Scalars, the factors of parallel.expert_padding that would have been enough for the rows that have come so far; 0 where all
    found room. Behind a layer that had no room there are none."""
    found = (dispatch.route.needed for _, _, dispatch in find_dispatches(model))
    return [each for each in found if each is not None]


def write_stacked_gradients(
    model: nn.Module,
    grad_views: Mapping[str, GradView],
    adapt: Callable[[nn.Module, StackedMatmul], StackedMatmul] = lambda experts, matmul: matmul,
) -> dict[nn.Module, tuple[KeepsOutputs, ...]]:
    """Have the matmuls of experts that dispatch add their weights' gradients to the main gradients. grad_views: by parameter
    name, of the trained ones. Returns by the module of the experts what of it may be kept: the dispatch and its matmuls, also
    those that are not trained. adapt: from a module and a matmul, that with its adapter, which has main gradients of its own."""
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    found: dict[nn.Module, tuple[KeepsOutputs, ...]] = {}
    for _, module, dispatch in find_dispatches(model):
        local = dispatch.local
        if isinstance(local, LocalExperts):
            local.first, local.last = adapt(module, local.first), adapt(module, local.last)
        found[module] = (dispatch, *local.matmuls)
        for matmul in local.matmuls:
            if id(matmul.weight) in by_parameter:
                matmul.write_gradient_to(by_parameter[id(matmul.weight)])
    return found


# Names of what a mixture computes for every token beside its routed experts.
NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class SharedExperts:
    """A call of `module` that returns what `compute_ahead` has computed, if it is asked for that. name: the module's attribute in
    the mixture.

    During a forward the mixture's attribute of that name is shadowed by this object, in the module's own dict, which Python reads
    before it asks for submodules: the module that it stands for keeps its place, its name and its hooks.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self._input: ref[Tensor] | None = None
        self._ahead: tuple[Tensor, int, Tensor] | None = None

    # Nothing in a graph, where they are computed as they stand: within the operator of the routed ones they would not be
    # compiled.

    def enter(self, mixture: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook in front of the mixture: its input, [.., H], is what shared experts are computed from."""
        if torch.compiler.is_compiling():
            return
        # Weak: the mixture's own code may free its input before it ends.
        self._input = ref(args[0] if args else kwargs["hidden_states"])
        mixture.__dict__[self.name] = self

    def leave(self, mixture: nn.Module, args: Any, output: Any) -> None:
        """A hook behind the mixture."""
        if torch.compiler.is_compiling():
            return
        self._input = self._ahead = None
        mixture.__dict__.pop(self.name, None)

    def compute_ahead(self) -> None:
        """Compute them now, for the model to ask for them later."""
        x = None if self._input is None else self._input()
        if x is not None:
            self._ahead = x, version_of(x), self.module(x)

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Any:
        # Used once: a second call is of another input, or of this one after a write in place, which its version shows.
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _has_same_rows(x, ahead[0]) or version_of(x) != ahead[1]:
            return self.module(x)
        return ahead[2] if x is ahead[0] else ahead[2].view(x.shape)


def _has_same_rows(x: Tensor, other: Tensor) -> bool:
    """Whether x is the other tensor, perhaps in another shape: families flatten sequences.  x: [.., H]."""
    if x is other:
        return True
    # Compared by storage, not by address: on meta tensors have none. A view of other rows of the storage begins elsewhere.
    is_shared = storage_number(x) == storage_number(other) and x.storage_offset() == other.storage_offset()
    has_same_size = x.numel() == other.numel() and x.shape[-1] == other.shape[-1]
    return is_shared and has_same_size and x.is_contiguous() and other.is_contiguous()


def stand_in(mixture: nn.Module, experts: str, width: int) -> SharedExperts | None:
    """Let the mixture's shared experts be computed while rows travel; None where it has none, or its code does not allow it.

    mixture: on meta. experts: the name of its routed experts; width: H.
    """
    name = next((name for name in NAMES if name in dict(mixture.named_children())), None)
    if name is None or _find_order(mixture, name, experts, width) != ["routed", "shared, of the input"]:
        return None
    shared = SharedExperts(mixture.get_submodule(name), name)
    mixture.register_forward_pre_hook(shared.enter, with_kwargs=True)
    # Not always called: of such hooks torch's compiler guards on numbers, which differ between layers. Behind a forward that
    # failed what stands in the module's place calls the module.
    mixture.register_forward_hook(shared.leave)
    return shared


def _find_order(mixture: nn.Module, shared: str, experts: str, width: int) -> list[str]:
    """The order in which the mixture's own code calls its shared and its routed experts; empty where it does not run on hidden
    states alone."""
    # Found by running it without memory: which comes first is in the code of each family, and may change with a version.
    x, module = torch.empty(1, 2, width, device="meta"), mixture.get_submodule(shared)
    calls: list[str] = []

    def compute_routed(hidden: Tensor, *routing: Tensor) -> Tensor:
        calls.append("routed")
        return hidden.clone()

    def compute_shared(given: Tensor) -> Any:
        calls.append("shared, of the input" if _has_same_rows(given, x) else "shared")
        return module(given)

    mixture.__dict__ |= {experts: compute_routed, shared: compute_shared}
    try:
        with torch.no_grad():
            mixture(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return []  # it asks for more than hidden states: then they are computed where they stand
    finally:
        del mixture.__dict__[experts], mixture.__dict__[shared]
    return calls
