"""Regions: the parts of a layer in which each tensor-parallel rank computes with its own weights, and their streams of
random numbers.

    outside                 border in                    inside                           border out
    x replicated            copy;  dx summed             Y_r = f(x, W_r), a partial sum   sum over ranks
    x sharded by tokens     gather; dx reduce-scattered  the same, of all tokens          reduce-scatter

Either way y = sum_r f(x, W_r); `borders` has the exchanges. What is inside and not split is computed alike by all ranks from a
gradient that is one rank's part: its own gradient is partial.

Weight gradients of the column layers wait until the region's input gradient is on its way to the other ranks, and are
computed under that communication: dX = sum_r dY_r W_r travels while dW_r = dY_r^T X is multiplied.

    B sequences, S tokens of a whole sequence, s of them on this rank where they are sharded, D hidden features

Behind the classes stand the hooks by which regions and tokens attach to modules that are Hugging Face's own.

RNG streams are alike on all ranks where they compute alike, different where each computes its own:

    outside regions, tokens replicated       alike: residual dropout must drop the same elements everywhere
    outside regions, tokens sharded          different: other tokens
    inside attention and mlp                 different: other heads and features
    inside a mixture of experts              alike: a router that uses random numbers must route alike

A step seeds its generator by microbatch and layer, equally on all ranks, but for `mask_of` the rank where layers hold other
tokens. Every other stream is seeded by that seed, exclusive-or what is particular to the rank or the region: a function of where
we are. So nothing has to be kept for recomputation, which restores the generator's state: the seed is part of it, and both masks
can be taken off again.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.comm.collectives import Pending
from framework.errors import ModelError
from framework.mesh.layout import part
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.initial import seed_for
from framework.model.matmul import MatmulLinear
from framework.parallel.tensor.borders import AsyncBorder, Border, ShardedBorder, enter_in_graph, leave_in_graph
from framework.torch_private import base_of, version_of

RANDOM_WORDS = ("drop", "jitter")
# Classes of modules that draw whatever their config says: phimoe's routers draw lots among experts of equal scores.
DRAWING_MODULES = ("PhimoeTopKRouter",)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def uses_rng_in_training(model: PreTrainedModel) -> bool:
    """Whether the model takes random numbers: a dropout or jitter of the config or of a module is not zero, a module draws in any
    case, or the model's code is not Hugging Face's and the names of its settings are unknown."""
    is_foreign = not type(model).__module__.startswith("transformers.models.")
    drops = any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules())
    draws = any(type(module).__name__ in DRAWING_MODULES for module in model.modules())
    return is_foreign or drops or draws or _is_random(model.config.to_dict())


def mask_of(tokens: TokenLayout) -> int:
    """The number with which a rank's seed of a layer is exclusive-or'd: 0 where all hold the same tokens, else the rank's own."""
    return _rank_mask(tokens.tp) if tokens.num_parts > 1 else 0


class RngStreams:
    """The streams of one rank, all on the generator of the device that a tensor is on; no random number is ever sent."""

    def __init__(self, tokens: TokenLayout) -> None:
        self._rank_mask, self._outside_mask = _rank_mask(tokens.tp), mask_of(tokens)
        # State of the generator in front of the first layer; None before it, and wherever no microbatch is in the layers.
        self._before: tuple[torch.Generator, Tensor] | None = None

    def start_outside(self, x: Tensor) -> None:
        """Begin the stream of the tokens that this rank alone holds, until `end_outside`. x: any shape; its device counts."""
        generator = torch_generator(x)
        self._before = generator, self._switch(generator, generator.initial_seed() ^ self._outside_mask)

    def end_outside(self) -> None:
        """Go on where `start_outside` left the stream that all ranks share. Nothing where it was not called."""
        if self._before is not None:
            generator, state = self._before
            generator.set_state(state)
            self._before = None

    def start_inside(self, x: Tensor, name: str, differs: bool) -> Tensor:
        """Begin the stream of region `name`, of this rank alone if it differs. Returns the generator's state until then, bytes
        [n]. x: any shape; its device counts."""
        generator = torch_generator(x)
        # The seed outside may carry the rank's mask already: a second one would take it off again.
        seed = generator.initial_seed() ^ self._outside_mask
        return self._switch(generator, seed ^ self.mask_inside(name, differs))

    def mask_inside(self, name: str, differs: bool) -> int:
        """The number by which the seed inside region `name` differs from that which all ranks share."""
        return seed_for("region", name) ^ (self._rank_mask if differs else 0)

    def restore(self, x: Tensor, state: Tensor) -> None:
        """Go on where an outer stream was left. x: any shape, on its device; state: what `start_inside` has returned, [n]."""
        torch_generator(x).set_state(state)

    def _switch(self, generator: torch.Generator, seed: int) -> Tensor:
        # The state holds the seed, too: who restores it goes on in the outer stream, and masks are taken of the outer seed again.
        state = generator.get_state()
        generator.manual_seed(seed)
        return state


def torch_generator(x: Tensor) -> torch.Generator:
    """The generator that operations on x's device take random numbers from. x: any shape."""
    return torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator


def _rank_mask(tp: Axis) -> int:
    return seed_for("tensor-parallel rank", tp.rank)


def _is_random(value: Any, name: str = "") -> bool:
    if isinstance(value, dict):
        return any(_is_random(inner, str(key)) for key, inner in value.items())
    # Probabilities are floats; an int or a bool of such a name (a number of dropped layers) takes no random numbers by itself.
    return isinstance(value, float) and value > 0 and any(word in name for word in RANDOM_WORDS)


class RegionCall:
    """One passage of one microbatch through a region: what its layers share between forward and backward.

    deferred: weight gradients that are still to be computed. kept: with re-gathering, the region's input as it came, [B, s, D],
    which layers keep for backward instead of the whole; None: they keep what they are given. leading: the whole input's shape
    without D, (B, S).
    """

    def __init__(self, border: Border, kept: Tensor | None) -> None:
        self.border, self.kept = border, kept
        self.leading: tuple[int, ...] = ()
        # Not where a compiled graph has entered the region, and ended within it, and where no gradient of the input is asked for:
        # column layers then compute weight gradients where they stand, as there is no sum to cover.
        self.is_open = False
        self.deferred: list[Callable[[], Any]] = []
        self._input: ref[Tensor] | None = None
        self._version = 0
        self._gathering: tuple[Tensor, Pending] | None = None
        self._whole: Tensor | None = None

    def hand_out(self, whole: Tensor) -> None:
        """Tell the call which tensor, [B, S, D], the model is given as the region's input."""
        self.leading, self.is_open = tuple(whole.shape[:-1]), whole.requires_grad
        # Weak: recomputation ends with the last tensor that backward needs, perhaps in front of the region's border out. Then
        # nobody closes the call, and every layer's whole input would live until its next forward.
        if self.kept is not None:
            self._input, self._version = ref(whole), version_of(whole)

    def find_kept(self, x: Tensor) -> Tensor | None:
        """The tensor from which x comes back in backward, [B, s, D]; None where x itself must be kept.

        x is brought back if it is the very tensor that was handed out, or the same rows in another shape (families flatten
        sequences), and nobody has written to it since. Anything else, a slice or a transposed view, is kept whole.
        """
        # After a write in place (mixtral's router jitter) a second gather would bring what the layer has not seen.
        whole = None if self._input is None else self._input()
        if whole is None or version_of(x) != self._version:
            return None
        if x is whole:
            return self.kept
        has_its_rows = x.numel() == whole.numel() and x.shape[-1] == whole.shape[-1] and x.is_contiguous()
        return self.kept if base_of(x) is whole and has_its_rows else None

    def close(self) -> None:
        """The region is left: forget its input."""
        self.kept = self._input = None
        self.is_open = False

    def start_gather(self, kept: Tensor) -> None:
        """Start to gather the input again over `tp`, once for all layers that ask. kept: [B, s, D]."""
        if self._gathering is None and self._whole is None:
            self._gathering = self.border.start_gather(kept)

    def end_backward(self) -> None:
        """Nothing asks any more. The region has its last call until it is entered again."""
        assert self._gathering is None, "an input was gathered again that no weight gradient has asked for"
        self._whole = None

    def gathered(self) -> Tensor:
        """The input [B, S, D] that `start_gather` started to bring: one tensor for all layers that ask."""
        # Joined once: layers whose weight gradients are left for later would each keep a copy until then.
        if self._whole is None:
            assert self._gathering is not None, "asked for before it was started"
            gathered, pending = self._gathering
            pending.wait()
            self._whole, self._gathering = self.border.join(gathered), None
        return self._whole


class Region:
    """One region of one layer: its borders, and the call that runs through it just now.

    regathers: keep only this rank's tokens of the input for backward, and gather them again there. rng: None if nothing inside
    takes random numbers; name: of its stream; differs: inside, every rank has a stream of its own. columns: its column layers,
    which add themselves.
    """

    def __init__(
        self,
        border: Border,
        regathers: bool = False,
        rng: RngStreams | None = None,
        name: str = "",
        differs: bool = True,
    ) -> None:
        self.border, self.axis, self.regathers = border, border.axis, regathers
        self.rng, self.name, self.differs = rng, name, differs
        self.call = RegionCall(border, None)
        self.columns: list[MatmulLinear] = []
        # The compiled operators do not cover RNG streams, communication under matmuls, and features that several ranks compute.
        self.has_operators = rng is None and not isinstance(border, AsyncBorder)
        self._outer: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The whole input, for ranks that use it in their own ways: x: [B, s, D] or replicated to [B, S, D].

        With tokens sharded it is gathered over `tp`; the gradient is summed over `tp` either way.
        """
        # Without a gradient of x no backward comes here, to end the layers' use of what is gathered again.
        is_differentiated = x.requires_grad and torch.is_grad_enabled()
        call = RegionCall(self.border, x.detach() if self.regathers and is_differentiated else None)
        whole = _Enter.apply(x, call)
        call.hand_out(whole)
        self.call = call
        # Last: what the border does above takes no random numbers, and the state to go back to is the one in front of the region.
        if self.rng is not None:
            self._outer = self.rng.start_inside(x, self.name, self.differs)
        return whole

    def leave(self, y: Tensor) -> Tensor:
        """The sum over `tp` of all ranks' y: [B, S, D], of all tokens or of this rank's, as it is outside."""
        self.end(y)
        # llama4's mixture gives rows, [B * S, D], of the sequences that it got: a rank's tokens are a part of each of them.
        if y.ndim <= len(self.call.leading):
            y = y.unflatten(0, self.call.leading)
        return self.border.leave(y)

    def end(self, y: Tensor) -> None:
        """Nothing behind this computes inside the region. y: any shape, on the device whose generator goes back to the outer
        stream."""
        self.call.close()
        if self.rng is not None and self._outer is not None:
            self.rng.restore(y, self._outer)
            self._outer = None


class _Enter(torch.autograd.Function):
    """A region's border in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: RegionCall) -> Tensor:
        ctx.call = call
        return call.border.enter(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        call: RegionCall = ctx.call
        out, pending = call.border.start_enter_adjoint(dx)
        # Under the communication: autograd comes here when all column layers have left their weight gradients.
        for compute in call.deferred:
            compute()
        # Their closures hold dY and the inputs; the call itself lives until the graph is freed.
        call.deferred.clear()
        call.end_backward()
        pending.wait()
        return out, None


def enter(region: Region, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """The input enters the region, [B, s, D] or replicated to [B, S, D]: the first argument, or `hidden_states`."""
    if torch.compiler.is_compiling() and region.has_operators:
        change = partial(enter_in_graph, region.border, columns=region.columns, regathers=region.regathers)
        return _on_input(change, args, kwargs)
    return _enter(region, args, kwargs)


# Not traced: what is a region's call changes with every microbatch, and the compiler would guard on it.
@torch.compiler.disable
def _enter(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]):
    return _on_input(region.enter, args, kwargs)


def scatter(border: ShardedBorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """In front of the first layer each rank goes on with its tokens: [B, S, D] to [B, s, D]."""
    return _on_input(border.scatter, args, kwargs)


def change_argument(
    change: Callable[[Any], Any],
    name: str,
    position: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
):
    """In front of a module: change its argument `name`, which has the place `position`, where it is given."""
    # Families differ in how they call their modules: by keyword, by position, or without the argument.
    if kwargs.get(name) is not None:
        return args, kwargs | {name: change(kwargs[name])}
    if len(args) > position and args[position] is not None:
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
    return args, kwargs


def start_outside(rng: RngStreams, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """From the first layer on ranks hold different tokens."""
    rng.start_outside(args[0] if args else kwargs["hidden_states"])


def end_outside(rng: RngStreams, model: nn.Module, args: Any, output: Any) -> None:
    """The tokens have come together, or the model, part of a pipeline, has run: what follows is computed alike again."""
    rng.end_outside()


def _on_input(change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]):
    x = args[0] if args else kwargs["hidden_states"]
    changed = change(x)
    # Wherever it is handed over: CTRL's attention is given it three times, as queries, keys and values.
    return tuple(changed if each is x else each for each in args), {
        name: changed if each is x else each for name, each in kwargs.items()
    }


def gather_behind(region: Region, border: ShardedBorder, is_layer: bool, module: nn.Module, args: Any, output: Any):
    """Behind the module, the final norm, the tokens come together, [B, s, D] to [B, S, D]: what follows is a region. is_layer: it
    is the last layer, where there is no such norm.

    ModelError if the module is called in front of the layers as well, and has weights.
    """
    if border.is_whole(output[0] if isinstance(output, tuple) else output):
        # NanoChat normalises the embedding by its final norm, too. With a weight that would be two kinds of gradient.
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} is used before and behind the layers: use parallel.sequence=false"
            )
        return output
    output = _on_output(region.enter, output)
    # Backward comes to the sum behind a layer when it has left the head's unit, whose gradients are reduced then.
    region.call.is_open &= not is_layer
    return output


def end_region(region: Region, module: nn.Module, args: Any, output: Tensor) -> None:
    """Behind a module that ends a region without a border out, the head: the logits, [B, S, V_r], stay divided."""
    region.end(output)


def leave(region: Region, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any):
    """The output leaves the region, [B, S, D] to [B, s, D] or replicated: the tensor, or the first of several."""
    if torch.compiler.is_compiling() and region.has_operators:
        leading = (args[0] if args else kwargs["hidden_states"]).shape[:-1]
        return _on_output(partial(leave_in_graph, region.border, leading=leading), output)
    return _leave(region, output)


# Not traced, as `enter`: beside the sum it ends the region's stream of random numbers, a state that no graph shows.
@torch.compiler.disable
def _leave(region: Region, output: Any):
    return _on_output(region.leave, output)


def find_regions_of(model: nn.Module) -> Iterator[Region]:
    """The regions of a model that has been split, but for the head's."""
    hooks = (vars(module).get("region_hook") for module in model.modules())
    return (region for region in hooks if isinstance(region, Region))


def _on_output(change: Callable[[Tensor], Tensor], output: Any):
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def select_heads(heads: int, axis: Axis, x: Any) -> Any:
    """This rank's heads of an argument that has something for each head: [B, heads, ...], else [B * heads, ., .]."""
    start, stop = part(heads, axis.rank, axis.size)
    # A mask that is the same for all heads, [B, 1, S, S] or none, serves this rank's heads as it is.
    if not isinstance(x, Tensor) or (x.ndim == 4 and x.shape[1] != heads):
        return x
    return x[:, start:stop] if x.ndim == 4 else x.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)


# Values by the module and the name under which its unmodified forward reads them, each with what it becomes for one call.
Lent = Mapping[tuple[nn.Module, str], Callable[[Tensor], Tensor]]


def lend(lent: Lent, module: nn.Module, args: Any) -> None:
    """In front of a module: have what is lent stand before parameters and buffers of the same names."""
    if torch.compiler.is_compiling():  # then what reads them is an operator, within which this is called
        return
    # An instance's own attribute is found before __getattr__ asks for parameters. Made anew in each call, so that the gradient
    # reaches the parameter, and is one rank's part like everything inside.
    for (holder, name), change in lent.items():
        # Recomputation ends with the last tensor that backward needs, perhaps within the module: then nobody has taken it back.
        holder.__dict__.pop(name, None)
        holder.__dict__[name] = change(getattr(holder, name))


def take_back(lent: Lent, module: nn.Module, args: Any, output: Any) -> None:
    """Undo `lend`."""
    for holder, name in () if torch.compiler.is_compiling() else lent:
        del holder.__dict__[name]
