"""Kernels of libraries for recurrent mixers, on CPUs: played by loops over tokens of the libraries' signatures, so that a wrong
call shows. Whether a GPU's kernels keep to it, `Libraries` asks on the GPU."""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices
from framework.model.units import CHANNEL_DELTA_RULE, CONVOLUTION, DELTA_RULE, STATE_OF_CHANNELS, STATE_OF_HEADS
from framework.parallel.attention.pieces import ONE_RANK, Pieces
from framework.parallel.attention.recurrent import FUNCTIONS, KERNELS, Libraries, hook_mixers
from framework.parallel.attention.visible_rows import Documents
from tests.families import RECURRENT, build_config
from tests.grid import IN_TURN

pytestmark = IN_TURN

LENGTH = 40
DOCUMENTS = Documents(((0, 3, 29), (0, 22, 23)), LENGTH)
ROUNDING = 2.0**-6


class Halves(ContextSlices):
    """Both halves of a sequence as pieces of one rank."""

    chunks, part = 2, LENGTH // 2


def apply_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """flash-linear-attention's: each token alone."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert g.dtype == torch.float32
    assert scale is None
    if cu_seqlens is None:
        spans = [(row, 0, q.shape[1]) for row in range(len(q))]
    else:
        assert len(q) == 1, "packed sequences are one row"
        assert cu_seqlens.dtype == torch.int32
        assert torch.equal(others["cu_seqlens_cpu"], cu_seqlens)
        spans = [(0, start, stop) for start, stop in pairwise(cu_seqlens.tolist())]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    decay = (g if g.ndim == 4 else g[..., None]).exp()
    rows, finals = [[] for _ in q], []
    for number, (row, start, stop) in enumerate(spans):
        state = q.new_zeros(v.shape[2], k.shape[3], v.shape[3])
        if initial_state is not None:
            assert initial_state.dtype == torch.float32
            assert initial_state.shape == (len(spans), *state.shape)
            state = state + initial_state[number]
        for t in range(start, stop):
            state = decay[row, t, :, :, None] * state
            new = v[row, t] - torch.einsum("hk,hkv->hv", k[row, t], state)
            state = state + torch.einsum("hk,hv->hkv", beta[row, t, :, None] * k[row, t], new)
            rows[row].append(torch.einsum("hk,hkv->hv", q[row, t], state) * k.shape[3] ** -0.5)
        finals.append(state)
    final = torch.stack(finals).float() if output_final_state else None
    return torch.stack([torch.stack(row) for row in rows]).bfloat16(), final


def convolve(x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Tensor:
    """causal-conv1d's."""
    assert x.stride(1) == 1, "documents only in channels last"
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (x.shape[0], x.shape[2]))
    places, y = torch.arange(x.shape[2]), torch.zeros_like(x, dtype=torch.float64)
    for back in range(weight.shape[1]):
        sees = (places >= back).expand(len(x), -1)
        if seq_idx is not None:
            sees = sees & (seq_idx == seq_idx.roll(back, 1))
        y = y + (x.double().roll(back, 2) * weight[:, -1 - back, None]).where(sees[:, None], 0)
    y = y if bias is None else y + bias[:, None]
    return (y if activation is None else F.silu(y)).to(x.dtype)


def scan_heads(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None, dt_bias: Any = None,
    seq_idx: Any = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    """mamba-ssm's of heads, with a bias of steps in front of softplus."""
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2])
    assert dt_softplus
    step = F.softplus(dt.double() + dt_bias).clamp(*dt_limit)
    b, c = (each.double().repeat_interleave(x.shape[2] // B.shape[2], 2) for each in (B, C))
    state, rows = 0.0, []
    for t in range(x.shape[1]):
        begins = torch.zeros(len(x), dtype=bool) if seq_idx is None or t == 0 else seq_idx[:, t] != seq_idx[:, t - 1]
        state = state * (step[:, t] * A).exp()[..., None, None] * ~begins[:, None, None, None]
        state = state + torch.einsum("zh,zhp,zhn->zhpn", step[:, t], x[:, t].double(), b[:, t])
        rows.append(torch.einsum("zhpn,zhn->zhp", state, c[:, t]) + D[:, None] * x[:, t])
    return torch.stack(rows, 1).to(x.dtype)


def scan_channels(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None, delta_bias: Any = None,
    delta_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """mamba-ssm's of channels."""
    assert A.dtype == D.dtype == delta_bias.dtype == torch.float32
    assert delta_softplus
    step = F.softplus(delta.double() + delta_bias[:, None])
    state, columns = 0.0, []
    for t in range(u.shape[2]):
        state = state * (step[:, :, t, None] * A).exp() + (step * u)[:, :, t, None] * B[:, None, :, t].double()
        columns.append(torch.einsum("zdn,zn->zd", state, C[:, :, t].double()) + D * u[:, :, t])
    return (torch.stack(columns, 2) * F.silu(z.double())).to(u.dtype)


PLAYED = {
    CONVOLUTION: convolve,
    DELTA_RULE: apply_rule,
    CHANNEL_DELTA_RULE: apply_rule,
    STATE_OF_HEADS: scan_heads,
    STATE_OF_CHANNELS: scan_channels,
}


def draw(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """What a mixer calls its function with."""
    generator = torch.Generator().manual_seed(3)

    def normal(*sizes: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(of).requires_grad_()

    wide = torch.float32
    if name == CONVOLUTION:
        return (normal(2, LENGTH, 16).mT, normal(16, 4), normal(16)), {"activation": "silu"}
    if name == STATE_OF_HEADS:
        options = {"chunk_size": 16, "D": normal(4), "dt_bias": normal(4), "dt_softplus": True, "z": None}
        x, b, c = normal(2, LENGTH, 4, 8), normal(2, LENGTH, 2, 8), normal(2, LENGTH, 2, 8)
        return (x, normal(2, LENGTH, 4), -normal(4, of=wide).exp(), b, c), options
    if name == STATE_OF_CHANNELS:
        options = {"D": normal(8, of=wide), "z": normal(2, 8, LENGTH), "delta_bias": normal(8, of=wide)}
        x, dt, b, c = normal(2, 8, LENGTH), normal(2, 8, LENGTH), normal(2, 4, LENGTH), normal(2, 4, LENGTH)
        return (x, dt, -normal(8, 4, of=wide).exp(), b, c), options | {"delta_softplus": True}
    keys, features = (2, ()) if name == DELTA_RULE else (4, (8,))
    options = {"g": -F.softplus(normal(2, LENGTH, 4, *features, of=wide)), "beta": normal(2, LENGTH, 4).sigmoid()}
    q, k, v = normal(2, LENGTH, keys, 8), normal(2, LENGTH, keys, 8), normal(2, LENGTH, 4, 6)
    return (q, k, v), options | {"use_qk_l2norm_in_kernel": True, "initial_state": None}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Mapping[str, Any]]]:
    """Install a library whose function of a mixer is this one; gives the options of each call of it."""

    def put(name: str, function: Callable[..., Any]) -> list[Mapping[str, Any]]:
        kernel, calls = KERNELS[name], []

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs | {"shape": args[0].shape})
            return function(*args, **kwargs)

        module = ModuleType(kernel.module)
        setattr(module, kernel.name, record)
        monkeypatch.setitem(sys.modules, kernel.module, module)
        return calls

    return put


def compute(
    libraries: Libraries, name: str, pieces: Pieces, documents: Documents | None, **changes: Any
) -> list[Tensor]:
    """The output and the gradients of the first arguments."""
    args, kwargs = draw(name, **changes)
    with pieces.of(documents):
        y = libraries.compute(name, FUNCTIONS[name], pieces, *args, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    return [y.double(), *(x.double() for x in torch.autograd.grad((y * weights).sum(), args[:3]))]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= ROUNDING * other.norm()


TAKEN = [
    *((name, ContextSlices, None) for name in PLAYED),
    *((name, ContextSlices, DOCUMENTS) for name in PLAYED if name != STATE_OF_CHANNELS),
    *((name, Halves, documents) for name in (DELTA_RULE, CHANNEL_DELTA_RULE) for documents in (None, DOCUMENTS)),
]


@pytest.mark.parametrize(("name", "slices", "documents"), TAKEN)
def test_a_library_computes_what_torch_does(install: Any, name: str, slices: Any, documents: Documents | None) -> None:
    calls, libraries, pieces = install(name, PLAYED[name]), Libraries("cpu"), Pieces(slices(LENGTH), ONE_RANK)
    found, wanted = (compute(each, name, pieces, documents) for each in (libraries, Libraries()))
    assert_close(found, wanted)
    before = len(calls)
    compute(libraries, name, pieces, documents)
    assert len(calls) == before + 1, "compared once"


@pytest.mark.parametrize("name", [CONVOLUTION, STATE_OF_HEADS, STATE_OF_CHANNELS])
def test_torch_computes_what_a_library_does_not_take(install: Any, name: str) -> None:
    install(name, PLAYED[name])
    whole, halves = (Pieces(slices(LENGTH), ONE_RANK) for slices in (ContextSlices, Halves))
    ways = [(halves, None), *([(whole, DOCUMENTS)] if name == STATE_OF_CHANNELS else [])]
    for pieces, documents in ways:
        found, wanted = (compute(each, name, pieces, documents) for each in (Libraries("cpu"), Libraries()))
        assert all(map(torch.equal, found, wanted))


def test_a_run_of_32_bits_and_another_device_are_not_a_librarys(install: Any) -> None:
    calls, pieces = install(DELTA_RULE, apply_rule), Pieces(ContextSlices(LENGTH), ONE_RANK)
    compute(Libraries("cpu"), DELTA_RULE, pieces, None, dtype=torch.float32)
    compute(Libraries(), DELTA_RULE, pieces, None)
    assert not calls


@pytest.mark.parametrize("name", PLAYED)
def test_without_a_library_torch_computes_and_the_log_says_what_to_install(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pieces, libraries = Pieces(ContextSlices(LENGTH), ONE_RANK), Libraries("cpu")
    with caplog.at_level(logging.WARNING):
        found = [compute(libraries, name, pieces, None) for _ in range(2)][1]
    assert all(map(torch.equal, found, compute(Libraries(), name, pieces, None)))
    assert [f"pip install {KERNELS[name].package}" in each for each in caplog.messages] == [True]


def forget(function: Callable[..., Any], option: str, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs | {option: None})


def scale(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Right forward, with half of the gradient."""
    y, *others = found if isinstance(found := function(*args, **kwargs), tuple) else (found,)
    y = y / 2 + y.detach() / 2
    return (y, *others) if others else y


def fail(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("no kernel image")


SPOILED = [
    *((name, ContextSlices, fail, "fails: no kernel image") for name in (CONVOLUTION, DELTA_RULE)),
    *((name, ContextSlices, partial(scale, PLAYED[name]), "is off by .* without documents") for name in PLAYED),
    *(
        (name, ContextSlices, partial(forget, PLAYED[name], "seq_idx"), "is off by .* with documents")
        for name in (CONVOLUTION, STATE_OF_HEADS)
    ),
    (DELTA_RULE, ContextSlices, partial(forget, apply_rule, "cu_seqlens"), "is off by .* with documents"),
    (DELTA_RULE, Halves, partial(forget, apply_rule, "initial_state"), "is off by .* without documents"),
]


@pytest.mark.parametrize(("name", "slices", "function", "message"), SPOILED)
def test_a_library_that_is_wrong_is_an_error_with_its_name(
    install: Any, name: str, slices: Any, function: Callable[..., Any], message: str
) -> None:
    install(name, function)
    pieces, kernel = Pieces(slices(LENGTH), ONE_RANK), KERNELS[name]
    with pytest.raises(ModelError, match=f"{kernel.package}: {kernel.name} {message}.*uninstall"):
        compute(Libraries("cpu"), name, pieces, None)


def test_a_model_calls_libraries_also_where_it_is_computed_again(install: Any) -> None:
    family = next(each for each in RECURRENT if each.name == "qwen3_5_text")
    model = AutoModelForCausalLM.from_config(build_config(family), dtype=torch.bfloat16)
    calls = {name: install(name, PLAYED[name]) for name in (CONVOLUTION, DELTA_RULE)}
    pieces = Pieces(ContextSlices(LENGTH), ONE_RANK)
    hook_mixers(model, pieces, Libraries("cpu"))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % model.config.vocab_size
    mask = DOCUMENTS.on_mask(tokens)
    # The first use of all is in a checkpoint.
    mixer = next(layer for layer in model.model.layers if hasattr(layer, "linear_attn")).linear_attn
    hidden = torch.randn(2, LENGTH, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with pieces.of(Documents.of_mask(mask)):
        checkpoint(mixer, hidden, use_reentrant=False).sum().backward()
    assert hidden.grad is not None
    for name, each in calls.items():
        found = [call for call in each if 96 not in call["shape"]]
        assert len(found) >= 2, f"{name}, and again"
    ends = [0, 3, 29, 40, 62, 63, 80]
    assert all(call["cu_seqlens"].tolist() == ends for call in calls[DELTA_RULE][-2:])
    assert all(call["seq_idx"][1].unique().tolist() == [0, 22, 23] for call in calls[CONVOLUTION][-2:])


@pytest.mark.parametrize("length", [8, 13])
def test_outputs_lie_in_memory_as_those_of_transformers(length: int) -> None:
    """Families view them with heads and channels as one dim (falcon_h1)."""
    x, dt, b = torch.randn(2, length, 4, 4), torch.randn(2, length, 4), torch.randn(2, length, 2, 8)
    pieces = Pieces(ContextSlices(length), ONE_RANK)
    y = FUNCTIONS[STATE_OF_HEADS](pieces, x, dt, -torch.rand(4), b, b, 8, D=torch.ones(4), dt_bias=torch.zeros(4))
    assert y.is_contiguous()
    o, _ = FUNCTIONS[DELTA_RULE](pieces, b, b, x, g=-torch.rand(2, length, 4), beta=torch.rand(2, length, 4))
    assert o.is_contiguous()
