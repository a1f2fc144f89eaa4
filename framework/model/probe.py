"""Questions to a family that only running it answers, each put to a small copy of the model on the CPU.

find_layer_calls           what do its layers take from one another, so that pipeline stages can be cut between them?
find_load_balancing_loss   is its load-balancing loss the one that stages can compute from sums?
keeps_documents_apart      does attention stay inside of documents that are packed into one row?
refuse_mixed_dtypes        do its tables in fp32 meet weights of another dtype?
refuse_unordered_layers    can tokens be divided between its layers, which are called in their order?
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.borders import ROWS, TOKENS, Border, Trace, Value
from framework.model.initial import seed_rng
from framework.model.load import FORWARD_ERRORS, accepted_arguments, build_meta, choose_experts
from framework.model.routers import LoadBalancingLoss, Routers, find_routers
from framework.model.shrink import shrink
from framework.model.stage import StageModel, copy_stage, find_following, hollow_out, refuse_split, split_stages
from framework.model.units import Unit, find_last_module, find_layers, find_units
from framework.output import first_line

# Differences relative to the largest number: above the rounding of fp32, below what anything else makes. Of 54 families, those
# that keep documents apart differ by 4e-7 at most, the others by 1e-2 at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_LOSS_DIFFERENCE = 1e-5
# Tokens of packed documents: one longer than the small model's windows of 8 or 9 tokens.
LENGTHS = (7, 12, 5)


def set_value(config: PretrainedConfig, path: str, value: Any) -> None:
    """Set a config's value by its dotted name."""
    *parts, name = path.split(".")
    for part in parts:
        config = getattr(config, part)
    setattr(config, name, value)


@contextmanager
def small_copy(config: PretrainedConfig, **changes: Any) -> Iterator[PreTrainedModel]:
    """A small model of the family with random weights: fp32, in eval mode, without gradients or a cache.

    The caller's RNG stays as it is. changes: of the small config, by dotted names. Raises ModelError where there is no small
    copy.
    """
    small = shrink(config)
    # Hugging Face's load-balancing loss fails on a part of a model without a router.
    for name, value in ({"use_cache": False, "output_router_logits": False} | changes).items():
        set_value(small, name, value)
    small.get_text_config().use_cache = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_rng(0)
        try:
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        except FORWARD_ERRORS as error:
            raise ModelError(f"a small {config.model_type} model cannot be built: {error}") from error
        choose_experts(model, "eager", torch.float32)  # grouped matmuls want widths that a small copy may not have
        yield model


def draw_tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Random token ids: [rows, length]."""
    return torch.randint(0, model.config.get_text_config().vocab_size, (rows, length))


@dataclass(frozen=True)
class LayerCalls:
    """Calls of a model's layers. num_outputs: of a layer, in a tuple; 0: a tensor alone. borders: by the first layer of a stage,
    what it takes from in front of it. is_plain: that is known to be hidden states and no more."""

    num_outputs: int = 0
    is_plain: bool = True
    borders: Mapping[int, Border] = field(default_factory=dict)


def find_layer_calls(
    config: PretrainedConfig, starts: Sequence[int] = (), compute: torch.dtype = torch.float32
) -> LayerCalls:
    """Find how the model of `config` calls its layers; the small copy is run whole, and as stages that are as short as may be.

    starts: layers that stages begin with, whose borders are asked for. Raises ModelError for a family that cannot be split.
    """
    with small_copy(config) as whole:
        units, tokens = find_units(whole), draw_tokens(whole, ROWS, TOKENS)
        layers = [unit.root for unit in units if unit.is_layer]
        modules = dict(whole.named_modules())
        try:
            trace = Trace(whole, layers, tokens)
        except FORWARD_ERRORS as error:
            raise refuse_split(config, f"it does not run on token ids alone ({error})") from error
        if (replaced := find_replaced(whole, modules)) is not None:
            raise refuse_split(config, replaced)
        if len(layers) < 2 or len(trace.counts) != len(layers) or len(set(trace.counts)) != 1:
            raise refuse_split(config, "its layers are not called one after another")
        edges = [start for start in range(1, len(layers)) if start not in find_following(whole, units)]
        known: list[Border] = [(), *_find_borders(config, trace, edges), ()]
        try:
            found = _run_in_stages(whole, units, trace.counts[0], [0, *edges, len(layers)], known, tokens)
        except FORWARD_ERRORS as error:
            raise refuse_split(config, f"a part of it does not run alone ({error})") from error
        if not _is_close(found, trace.logits):
            raise refuse_split(config, "its layers hand on more than their arguments tell, or share what they compute")
        hidden, width = known[1][0], whole.config.get_text_config().hidden_size
        if hidden.sizes[-1] == width and all(trace.is_plain(start) for start in edges):
            sizes, path = (*hidden.sizes[:-1], config.get_text_config().hidden_size), hidden.places[0][1]
            dtype = _find_dtype(whole, layers, compute, tokens)
            alike = {start: (Value(((start, path),), hidden.rows, sizes, dtype),) for start in starts}
            return LayerCalls(trace.counts[0], True, alike)
    sized = _trace_whole(config, starts, compute) if starts else {}
    return LayerCalls(trace.counts[0], bool(sized) and all(len(border) == 1 for border in sized.values()), sized)


def _find_borders(config: PretrainedConfig, trace: Trace, starts: Sequence[int]) -> list[Border]:
    borders = [trace.border(start) for start in starts]
    if None in borders:
        raise refuse_split(config, "its layers hand on a value that has no dims of sequences and tokens")
    return [border for border in borders if border is not None]


def _run_in_stages(
    whole: PreTrainedModel,
    units: Sequence[Unit],
    num_outputs: int,
    edges: Sequence[int],
    borders: Sequence[Border],
    tokens: Tensor,
) -> Tensor:
    """The logits of stages between edges, layers. borders: in front of each stage, and behind the last one."""
    message: tuple[Any, ...] = ()
    for bounds in split_stages([stop - start for start, stop in pairwise(edges)]):
        part = copy_stage(whole, units, bounds, num_outputs)
        hollow_out(part, units, bounds, torch.float32)
        stage = StageModel(part, units, bounds, borders[bounds.index], borders[bounds.index + 1])
        message = stage(message, input_ids=tokens)
    return message[0].logits


def _find_dtype(whole: PreTrainedModel, layers: Sequence[str], compute: torch.dtype, tokens: Tensor) -> torch.dtype:
    """The dtype of hidden states beside weights of the compute dtype, which some families keep in fp32. Leaves the small copy in
    that dtype."""
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(compute)
    try:
        border = Trace(whole, layers, tokens).border(1)
    except FORWARD_ERRORS:
        return compute  # `refuse_mixed_dtypes` says why
    return compute if border is None else border[0].dtype


def _trace_whole(config: PretrainedConfig, starts: Sequence[int], compute: torch.dtype) -> dict[int, Border]:
    """The borders of the model of `config` itself, run on meta: sizes of values that are no hidden states are its own."""
    model = build_meta(config, dtype=compute)
    choose_experts(model, "batched_mm", compute)
    layers = [unit.root for unit in find_units(model) if unit.is_layer]
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="meta")
    try:
        trace = Trace(model, layers, tokens)
    except FORWARD_ERRORS as error:
        raise refuse_split(
            config, f"what its layers hand on cannot be sized, as it does not run on meta ({error})"
        ) from error
    return dict(zip(starts, _find_borders(config, trace, starts), strict=True))


def find_replaced(model: nn.Module, before: Mapping[str, nn.Module]) -> str | None:
    """The reason why what is attached to modules does not last, if a forward has put others in their places, as big_bird's does
    for short sequences. before: the model's, by name, in front of its first forward."""
    found = next((name for name, each in model.named_modules() if before.get(name) is not each), None)
    return None if found is None else f"its forward puts another module in the place of {found}"


def find_routers_loss(whole: PreTrainedModel, z_loss: float = 0.0) -> LoadBalancingLoss | None:
    """The load-balancing loss that the model's config asks for, with a router z-loss of this weight; None where neither is.
    Raises ModelError for a z-loss of a model without routers."""
    if z_loss and not any(True for _ in find_routers(whole)):
        raise ModelError(
            f"train.router_z_loss={z_loss:g}: transformers records no router's logits of {whole.config.model_type} models. Set it"
            " to 0"
        )
    loss = find_load_balancing_loss(whole)
    return replace(loss or LoadBalancingLoss(0, 0, 0.0), z_loss=z_loss) if z_loss else loss


def find_load_balancing_loss(whole: PreTrainedModel) -> LoadBalancingLoss | None:
    """The load-balancing loss that the model's config asks for, or None.

    The small copy computes it in Hugging Face's code and from the sums. Raises ModelError for a family where the two differ.
    """
    config = whole.config
    if not getattr(config, "output_router_logits", False):
        return None
    weight = getattr(config, "router_aux_loss_coef", None)
    if weight is None:
        raise _refuse_loss(config, "it has no router_aux_loss_coef")
    try:
        with small_copy(config, output_router_logits=True) as model:
            tokens = draw_tokens(model, 2, 6)
            expected = model(input_ids=tokens).aux_loss
            routers = Routers(model, _read_loss(model, 1.0), torch.float32, torch.device("cpu"))
            routers.start()
            model(input_ids=tokens, output_router_logits=False)
            difference = (routers.loss.compute(routers.end()) - expected).abs() / expected.abs()
        loss = _read_loss(whole, weight)
    except FORWARD_ERRORS as error:
        raise _refuse_loss(config, f"it is not one of the routers' logits ({error})") from error
    if not difference <= LARGEST_LOSS_DIFFERENCE:
        raise _refuse_loss(config, "it is not E sum_e f_e P_e over all layers")
    return loss


def _read_loss(model: Any, weight: float) -> LoadBalancingLoss:
    return LoadBalancingLoss(model.num_experts, model.num_experts_per_tok, weight)


def _refuse_loss(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(
        f"model.config.output_router_logits=true: the load-balancing loss of {config.model_type} models is not known: {reason}."
        " Set it to false"
    )


def keeps_documents_apart(config: PretrainedConfig) -> bool:
    """Whether packed documents have the same logits as alone, given positions that restart, and neither cache nor mask.

    Hugging Face's mask functions keep attention inside of documents where positions restart, if the model hands the positions
    on. Most do; gpt_oss, falcon, opt and others do not, and linear attention carries its state across. Neither signature nor
    config tells which, and a model that mixes documents up trains on without a word.

    Raises ModelError where the family's forward fails: roberta's wants the id of a padding token.
    """
    with small_copy(config) as model:
        if "position_ids" not in accepted_arguments(model):
            return False
        tokens = draw_tokens(model, 1, sum(LENGTHS))
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        try:
            packed = model(input_ids=tokens, position_ids=positions).logits
            alone = torch.cat([model(input_ids=each).logits for each in tokens.split(LENGTHS, dim=1)], dim=1)
        except FORWARD_ERRORS as error:
            raise ModelError(
                f"a small {config.model_type} model does not run on token ids and positions alone: {error}"
            ) from error
    return _is_close(packed, alone)


def refuse_mixed_dtypes(model: PreTrainedModel, config: PretrainedConfig, compute: torch.dtype) -> None:
    """Raise ModelError where a forward on a CPU fails in `compute` and not in fp32. model: of `config`, may be on meta.

    Parameters are cast to the compute dtype, buffers keep theirs. Models cast what they read from a table of positions to the
    dtype of the hidden states; xglm adds it as it is, hidden states become fp32, and torch refuses them beside weights of
    another dtype. Models without tables are not run: every family deals with vectors, such as rotary frequencies and scales.
    """
    tables = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.dim() > 1]
    if not tables or compute not in (torch.bfloat16, torch.float16):
        return
    with small_copy(config) as copy:
        tokens = draw_tokens(copy, 1, 8)
        try:
            copy(input_ids=tokens)
        except FORWARD_ERRORS:
            return  # it says nothing about dtypes
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(compute)
        try:
            copy(input_ids=tokens)
        except FORWARD_ERRORS as error:
            dtype = str(compute).removeprefix("torch.")
            raise ModelError(
                f"{config.model_type} does not run in {dtype} on a CPU, because its {tables[0]} stays fp32"
                f" ({first_line(error)}). Use precision=fp32"
            ) from error


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= LARGEST_DIFFERENCE * expected.abs().max())


NUM_TOKENS = 6
# In the place of a layer's index.
LAST = -1

Call = tuple[int, int | None]


def refuse_unordered_layers(config: PretrainedConfig) -> None:
    """Raises ModelError for a family whose tokens cannot be divided between layers, which ranks find out in their first forward.

    Tokens are scattered in front of the first layer and come together behind the last module of the decoder. So the first layer
    runs first and once, with all tokens of a sequence, and a last module with weights runs behind all layers only. hrm_text goes
    through one list of layers again and again. Says nothing where there is no small copy that runs: others tell why.
    """
    try:
        with small_copy(config) as model:
            reason = _find_reason(_record_calls(model), _has_weights(model))
    except (ModelError, *FORWARD_ERRORS):
        return
    if reason is not None:
        raise ModelError(
            f"parallel.sequence=true cannot divide the tokens of {config.model_type} models between layers: {reason}. Use"
            " parallel.sequence=false"
        )


def _has_weights(model: PreTrainedModel) -> bool:
    return any(parameter.requires_grad for parameter in find_last_module(model).parameters())


def _record_calls(model: PreTrainedModel) -> list[Call]:
    """The layers by index, and the last module, as the model calls them, each with the tokens of its input; None: unknown."""
    calls: list[Call] = []
    found = find_layers(model)
    assert found is not None, "a model was split that has no layers"
    for index, layer in enumerate(found[1]):
        layer.register_forward_pre_hook(partial(_note, calls, index), with_kwargs=True)
    find_last_module(model).register_forward_pre_hook(partial(_note, calls, LAST), with_kwargs=True)
    model(input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.int64))
    return calls


def _note(calls: list[Call], index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else kwargs.get("hidden_states")
    calls.append((index, x.shape[-2] if isinstance(x, Tensor) and x.ndim > 1 else None))


def _find_reason(calls: list[Call], has_weights: bool) -> str | None:
    """The reason why tokens cannot be divided, if there is one. has_weights: of the last module."""
    layers = [call for call in calls if call[0] != LAST]
    if not layers:
        return None
    if layers[0][0] != 0 or sum(index == 0 for index, _ in layers) > 1:
        return "its first layer does not run first and once"
    if layers[0][1] != NUM_TOKENS:
        return f"its first layer gets {layers[0][1] or 'unknown'} tokens of a sequence of {NUM_TOKENS}"
    first = next((index for index, call in enumerate(calls) if call[0] == LAST), len(calls))
    is_early = first < max(index for index, call in enumerate(calls) if call[0] != LAST)
    return (
        "the norm behind its layers, which has weights, runs in front of one, too" if is_early and has_weights else None
    )
