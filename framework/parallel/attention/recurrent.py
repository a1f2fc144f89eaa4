"""Recurrent mixers whose sequences are divided over `cp`, or hold several documents: they compute by our functions on the
pieces of a rank, or by libraries of kernels.

`pieces` says which parts of a sequence a rank has, and brings what a part needs of those before it: a window of tokens, which is
all that a short convolution needs, and the state with which it begins. `recurrences` are functions that take the place of those
which the family's own forward calls.

The forward of a mixer stays the family's; the functions that it calls for what mixes tokens become ours. The model is told
the documents of a microbatch on its attention mask, which it keeps from its mixers. So the model notes them when it is
called, each layer is called with them, and while the layer computes, its mixers find them with their pieces: again where it
is recomputed, because checkpointing keeps a layer's arguments.

Libraries (flash-linear-attention, causal-conv1d, mamba-ssm), which transformers' own mixers would call, are used on CUDA
where they are installed and never needed. A kernel takes the place of torch's operations for tensors of 16 bits. Before its
first use on a device both compute an example as wide as what it is given, forward and backward, and a difference is an error:
it would show in the loss only. What a kernel does not take torch's operations compute: `call` gives None.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.comm.fused import compute_apart
from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices
from framework.model.units import (
    CHANNEL_DELTA_RULE,
    CONVOLUTION,
    DELTA_RULE,
    MASK,
    STATE_OF_CHANNELS,
    STATE_OF_HEADS,
    WHOLE_MIXERS,
    call_by,
    called_names,
    find_layers,
    find_mixers,
)
from framework.parallel.attention.pieces import ONE_RANK, Pieces, convolve
from framework.parallel.attention.recurrences import (
    apply_by,
    apply_delta_rule,
    have_no_kernel,
    scan_channels,
    scan_heads,
)
from framework.parallel.attention.visible_rows import Documents

log = logging.getLogger(__name__)


def keep_padding(pieces: Pieces, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """Called as transformers' `apply_mask_to_padding_states`. mask: carries documents if there is one (mamba hands on what the
    model gets): rows have no padding in front of tokens."""
    return hidden_states


# The argument by which a layer gets its documents.
ARGUMENT = "meshwright_documents"
# Each called with the pieces in front of the arguments of the function that it stands for.
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    CONVOLUTION: convolve,
    DELTA_RULE: apply_delta_rule,
    CHANNEL_DELTA_RULE: apply_delta_rule,
    STATE_OF_HEADS: scan_heads,
    STATE_OF_CHANNELS: scan_channels,
    MASK: keep_padding,
    **dict.fromkeys(WHOLE_MIXERS, have_no_kernel),
})  # fmt: skip


def hook_mixers(model: PreTrainedModel, pieces: Pieces, libraries: "Libraries | None" = None) -> None:
    """Have every recurrent mixer of the model compute on these pieces; without one nothing changes. libraries: of kernels for
    them."""
    mixers, libraries = dict(find_mixers(model)), libraries or Libraries()
    found = find_layers(model)
    if not mixers or found is None:
        return
    for mixer in mixers.values():
        hook_mixer(mixer, pieces, libraries)
    notes = _Notes()
    model.register_forward_pre_hook(notes.read, with_kwargs=True)
    for layer in found[1]:
        if any(module in mixers.values() for module in layer.modules()):
            layer.register_forward_pre_hook(notes.hand_over, with_kwargs=True)
            layer.forward = partial(_compute_layer, pieces, layer.forward)


def hook_mixer(mixer: nn.Module, pieces: Pieces, libraries: "Libraries | None" = None) -> None:
    """Have one recurrent mixer compute on these pieces."""
    names, compute = called_names(mixer), (libraries or Libraries()).compute
    call_by(mixer, {name: partial(compute, name, each, pieces) for name, each in FUNCTIONS.items() if name in names})


class _Notes:
    """The documents of the microbatch with which a model was called last."""

    def __init__(self) -> None:
        self.documents: Documents | None = None

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In front of the model."""
        mask = kwargs.get("attention_mask")
        self.documents = Documents.of_mask(mask) if isinstance(mask, Tensor) else None

    def hand_over(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In front of a layer."""
        return args, kwargs | {ARGUMENT: self.documents}


def _compute_layer(pieces: Pieces, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # For as long as it computes: by the time that a layer is recomputed, the model may have been called with another microbatch.
    with pieces.of(kwargs.pop(ARGUMENT, None)):
        return forward(*args, **kwargs)


DTYPES = (torch.bfloat16, torch.float16)
# Largest ratio of a difference's root mean square to that of torch's operations. Kernels round within a chunk, to 0.02 by their
# own tests.
AGREEMENT = 2.0**-4
# The example: more tokens than a chunk, and its documents.
LENGTH, STARTS = 96, ((0, 5, 17, 31, 88),)


def convolve_by(
    function: Callable[..., Tensor], pieces: Pieces, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_others: Any,
) -> Tensor | None:  # fmt: skip
    """`convolve` by causal-conv1d."""
    if (
        not pieces.is_whole
        or len(weight) % 8
        or not 2 <= weight.shape[1] <= 4
        or activation not in (None, "silu", "swish")
    ):
        return None
    # Tokens before channels in memory, as projections leave them: other orders know no documents.
    x = x.mT.contiguous().mT
    return function(x, weight, bias, seq_idx=_find_numbers(pieces, x), activation=activation)


def scan_heads_by(function: Callable[..., Tensor], pieces: Pieces, *inputs: Tensor, **options: Any) -> Tensor | None:
    """`scan_heads` by mamba-ssm."""
    names = ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit")
    given = {name: options[name] for name in names if name in options}
    return function(*inputs, seq_idx=_find_numbers(pieces, inputs[0]), **given) if pieces.is_whole else None


def scan_channels_by(function: Callable[..., Tensor], pieces: Pieces, *inputs: Tensor, **options: Any) -> Tensor | None:
    """`scan_channels` by mamba-ssm, which knows no documents there."""
    given = {name: options[name] for name in ("D", "z", "delta_bias", "delta_softplus")}
    return function(*inputs, **given) if pieces.is_whole and pieces.documents is None else None


def _find_numbers(pieces: Pieces, x: Tensor) -> Tensor | None:
    """A number of each token's document, [B, T] int32; None where every sequence is one document."""
    starts = pieces.starts(x.device)
    return None if starts is None else starts[:, 0].int().expand(len(x), -1).contiguous()


class LibraryKernel(NamedTuple):
    """A function of a library. package: for pip; call: (the function, pieces, arguments of ours) -> what ours computes; tokens:
    the dim of tokens in arguments."""

    package: str
    module: str
    name: str
    call: Callable[..., Any]
    tokens: int


# Keyed by the function of a mixer that it stands for.
KERNELS: Mapping[str, LibraryKernel] = MappingProxyType({
    CONVOLUTION: LibraryKernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", convolve_by, 2),
    DELTA_RULE: LibraryKernel(
        "flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", apply_by, 1
    ),
    CHANNEL_DELTA_RULE: LibraryKernel("flash-linear-attention", "fla.ops.kda", "chunk_kda", apply_by, 1),
    STATE_OF_HEADS: LibraryKernel(
        "mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", scan_heads_by, 1
    ),
    STATE_OF_CHANNELS: LibraryKernel(
        "mamba-ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", scan_channels_by, 2
    ),
})  # fmt: skip


class Libraries:
    """Made once a model: remembers which kernels work on the devices that it has met. device_type: of devices that have any."""

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._found: dict[tuple[str, torch.device, bool], Callable[..., Any] | None] = {}

    def compute(self, name: str, plain: Callable[..., Any], pieces: Pieces, *args: Any, **kwargs: Any) -> Any:
        """A mixer's function of that name, by a library or by `plain`, our own. Raises ModelError where the two differ."""
        if name not in KERNELS or args[0].device.type != self._device_type or args[0].dtype not in DTYPES:
            return plain(pieces, *args, **kwargs)
        kernel, key = KERNELS[name], (name, args[0].device, pieces.is_whole)
        if key not in self._found:
            of_call = kernel, plain, pieces.is_whole, args, kwargs
            self._found[key] = compute_apart(args[0].device, _find, *of_call)
        function = self._found[key]
        found = None if function is None else kernel.call(function, pieces, *args, **kwargs)
        return plain(pieces, *args, **kwargs) if found is None else found


def _find(kernel: LibraryKernel, plain: Any, is_whole: bool, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """The function of a library; None where it is not installed."""
    try:
        function: Callable[..., Any] = getattr(import_module(kernel.module), kernel.name)
        fault = _find_fault(kernel, function, plain, is_whole, args, kwargs)
    except ModuleNotFoundError as error:
        log.warning("%s, so mixers run in torch's operations, more slowly: pip install %s", error, kernel.package)
        return None
    except Exception as error:  # whatever a library raises
        fault = f"fails: {error}"
    if fault is not None:
        raise ModelError(
            f"{kernel.package}: {kernel.name} {fault}: another version of {kernel.package}, or uninstall it"
        )
    return function


def _find_fault(kernel: LibraryKernel, function: Any, plain: Any, is_whole: bool, args: Any, kwargs: Any) -> str | None:
    """Difference of a kernel from torch's operations, with documents and without; None where they agree."""
    pieces = Pieces((ContextSlices if is_whole else _Halves)(LENGTH), ONE_RANK)
    for documents in (None, Documents(STARTS, LENGTH)):
        with pieces.of(documents):
            found = _differentiate(kernel, lambda *a, **k: kernel.call(function, *a, **k), pieces, args, kwargs)
            wanted = _differentiate(kernel, plain, pieces, args, kwargs)
        for one, other in zip(found, wanted, strict=False):
            # A NaN is no agreement.
            if not (difference := (one - other).norm()) <= AGREEMENT * other.norm():
                return f"is off by {difference / other.norm():.2g}, {'with' if documents else 'without'} documents"
    return None


def _differentiate(kernel: LibraryKernel, form: Any, pieces: Pieces, args: Any, kwargs: Any) -> list[Tensor]:
    """The output of a form for such arguments and their gradients, fp64; none where it does not take them."""
    generator, inputs = torch.Generator().manual_seed(0), []

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        sizes = [*x.shape]
        if x.ndim > 2:
            sizes[0], sizes[kernel.tokens] = 2, LENGTH
        # Not the mixer's numbers: where decays are strong their gradients are nothing but rounding. Decays stay below 0, the
        # rule's rates between 0 and 1.
        y = torch.randn(sizes, generator=generator)
        y = -y.abs() / 8 if x.le(0).all() else y.sigmoid() if x.ge(0).all() else y
        inputs.append(y.to(x).requires_grad_())
        return inputs[-1]

    y = form(pieces, *map(draw, args), **{name: draw(x) for name, x in kwargs.items()})
    if y is None:
        return []
    y = y[0] if isinstance(y, tuple) else y
    gradient = torch.randn(y.shape, generator=generator).to(y)
    return [x.double() for x in (y.detach(), *torch.autograd.grad(y, inputs, gradient, materialize_grads=True))]


class _Halves(ContextSlices):
    """Both halves of a sequence as pieces of one rank."""

    chunks, part = 2, LENGTH // 2
