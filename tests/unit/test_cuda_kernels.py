"""Kernels that only CUDA runs, on CPUs: torch's operators are played by plain ones of the same arguments, shapes and meaning, so
that a wrong call shows. Whether a GPU's operators keep to it, `find_fault` asks on the GPU."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import Axis
from framework.model.kept_outputs import KeptOutputs
from framework.parallel.activation_checkpointing import CheckpointedForward
from framework.parallel.attention import block_attention, cuda_kernels
from framework.parallel.attention.attention import ContextAttention, attend_in_graph
from framework.parallel.attention.block_attention import AttentionBlock, BlockAttention, find_fault
from framework.parallel.attention.cuda_kernels import CudaFlash, CudnnFlash, FlexKernel, make_block_mask
from framework.parallel.attention.kernels import CpuFlash, Heads, Kernel, Packing, TileKernel
from framework.parallel.attention.visible_rows import Documents, PieceKind, Scores
from framework.torch_private import compiler_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Bounds = tuple[Tensor | None, Tensor | None, int, int]


def see(n: int, m: int, is_causal: bool, left: int | None, right: int | None) -> Tensor:
    """[n, m] bool: rows are aligned at their ends, as FlashAttention aligns them."""
    ahead = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    right = 0 if is_causal else right
    return (ahead <= (m if right in (None, -1) else right)) & (ahead >= -(m + n if left in (None, -1) else left))


def parts(q: Tensor, k: Tensor, bounds: Bounds) -> list[tuple[Any, Any]]:
    """Where each sequence's queries and keys are: of a dense call [B, n, H, D], or a packed one [T, H, D]."""
    ends_q, ends_k, longest_q, longest_k = bounds
    if ends_q is None or ends_k is None:
        assert q.ndim == 4
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        return [(number, number) for number in range(len(q))]
    assert q.ndim == 3
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert longest_q == ends_q.diff().max()
    of_queries, of_keys = ([slice(*each) for each in pairwise(ends.tolist())] for ends in (ends_q, ends_k))
    return list(zip(of_queries, of_keys, strict=True))


def score(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q: [n, H, D], k: [m, Hk, D] -> [H, n, m]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("nhd,mhd->hnm", q, k) * scale).masked_fill(~seen, -math.inf)


def flash(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Any, ends_k: Any, longest_q: int, longest_k: int, dropout: float,
    is_causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert (dropout, debug) == (0.0, False)
    out, sums, places = torch.empty_like(q), [], parts(q, k, (ends_q, ends_k, longest_q, longest_k))
    for at, of in places:
        seen = see(q[at].shape[0], k[of].shape[0], is_causal, window_size_left, window_size_right)
        scores = score(q[at], k[of], seen, scale)
        values = v[of].repeat_interleave(q.shape[-2] // v.shape[-2], 1)
        out[at] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
        sums.append(scores.logsumexp(-1))
    return (
        out,
        torch.stack(sums) if ends_q is None else torch.cat(sums, 1),
        torch.empty(2),
        torch.empty(0),
        torch.empty(0),
    )


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, ends_q: Any, ends_k: Any,
    longest_q: int, longest_k: int, dropout: float, is_causal: bool, random: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert log_sum.is_contiguous()
    assert random.dtype == torch.uint64
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for at, of in parts(q, k, (ends_q, ends_k, longest_q, longest_k)):
        seen = see(q[at].shape[0], k[of].shape[0], is_causal, window_size_left, window_size_right)
        group = q.shape[-2] // k.shape[-2]
        p = (score(q[at], k[of], seen, scale) - (log_sum[at] if ends_q is None else log_sum[:, at])[..., None]).exp()
        values, keys = (x[of].repeat_interleave(group, 1) for x in (v, k))
        delta = (gradient[at] * out[at]).sum(-1).T[..., None]
        ds = p * (torch.einsum("nhd,mhd->hnm", gradient[at], values) - delta) * scale
        dq[at] = torch.einsum("hnm,mhd->nhd", ds, keys)
        dk[of] = torch.einsum("hnm,nhd->mhd", ds, q[at]).unflatten(1, (-1, group)).sum(2)
        dv[of] = torch.einsum("hnm,nhd->mhd", p, gradient[at]).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, keeps_sums: bool, dropout: float, is_causal: bool, debug: bool, *, scale: float
) -> tuple[Tensor, ...]:  # fmt: skip
    assert keeps_sums
    tokens = [x.transpose(1, 2) for x in (q, k, v)]
    out, log_sum, *_ = flash(*tokens, None, None, q.shape[2], k.shape[2], dropout, is_causal, debug, scale=scale)
    return out.transpose(1, 2), log_sum[..., None]


def cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, seed: Tensor, offset: Tensor, bias: None,
    ends_q: None, ends_k: None, longest_q: int, longest_k: int, dropout: float, is_causal: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradient, q, k, v, out = (x.transpose(1, 2) for x in (gradient, q, k, v, out))
    random = torch.zeros(2, dtype=torch.uint64)
    lengths = ends_q, ends_k, longest_q, longest_k
    found = flash_backward(
        gradient, q, k, v, out, log_sum[..., 0], *lengths, dropout, is_causal, random, random, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in found)


@pytest.fixture
def plays_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in (flash, flash_backward, cudnn, cudnn_backward):
        monkeypatch.setattr(cuda_kernels, operator.__name__, operator)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor], mask: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """flex_attention's arguments and results, on scores of all pairs."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    b, h, n, m = torch.meshgrid(*(torch.arange(size) for size in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = score_mod(q @ k.mT * scale, b, h, n, m)
    if mask is not None:
        scores = scores.masked_fill(~mask.mask_mod(b, h, n, m), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.usefixtures("plays_cuda")
@pytest.mark.parametrize(
    "kernel", [CudaFlash(), CudnnFlash(), FlexKernel(0.7, attend_plainly)], ids=lambda k: type(k).__name__
)
def test_a_kernel_computes_what_the_tiles_do(kernel: Kernel) -> None:
    assert find_fault(kernel, CPU, torch.float64) is None


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_kernel_that_autograd_differentiates_works_where_layers_call_it(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the operator of a compiled layer, below autograd; and in a checkpointed forward, whose hooks compute it again."""
    monkeypatch.setattr(
        BlockAttention, "_candidates", lambda *_: (FlexKernel(0.7, attend_plainly),) if is_played else ()
    )
    monkeypatch.setattr(FlexKernel, "dtypes", (torch.float64,))
    axes = [Communicator(Axis(name, 1, 0)) for name in ("ulysses", "ring")]
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(2, heads, 40, 8, generator=generator, dtype=torch.double) for heads in (4, 2, 2)]
    scores, found = Scores(0.3, softcap=0.7), []
    is_played = False
    for is_played in (False, True):
        attention = ContextAttention(ContextSlices(40), *axes, "ring", BlockAttention())
        attention.give_number()
        q, k, v = (x.clone().requires_grad_() for x in drawn)
        if is_compiled:
            out = attend_in_graph(attention, q, k, v, scores, None, None)
        else:
            kept = KeptOutputs(["attention"], catches=True)
            attention.keep_outputs(kept, "attention")
            out = CheckpointedForward(lambda *heads: attention(*heads, scores).sin(), kept, False)(q, k, v).asin()  # noqa: B023
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        assert list(attention.block._faults.values()) == [None] * is_played
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("plays_cuda")
def test_a_window_that_is_one_row_too_wide_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_kernels, "_find_sight", lambda packing: {"window_size_left": packing.window or -1, "window_size_right": 0}
    )
    assert "is wrong" in str(find_fault(CudaFlash(), CPU, torch.float64))


@pytest.mark.usefixtures("plays_cuda")
@pytest.mark.parametrize("window", [None, 9])
def test_sequences_with_other_documents_each_are_one_call(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 40, 8, generator=generator, dtype=torch.double) for heads in (4, 2, 2))
    documents = Documents(((0, 3, 20), (0, 39)), 40)
    block = AttentionBlock(Heads(q, k, v), (8, 48), (8, 48), Scores(0.3, window), Documents(((0, 11, 28), (0, 47)), 48))
    tiles = BlockAttention(16).forward(block)
    assert tiles is not None
    calls: list[int] = []
    monkeypatch.setattr(cuda_kernels, "flash", lambda *args, **options: calls.append(1) or flash(*args, **options))
    found = CudaFlash().forward_packed(block.heads, block.packing, 0.3)
    assert len(calls) == 1
    assert max((a - b).abs().max() for a, b in zip(found, tiles, strict=True)) < 1e-12
    assert documents.ends((0, 40), 2, CPU).offsets.tolist() == [0, 3, 20, 40, 79, 80]


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("starts", [((0,),), ((0, 5, 130, 400, 401), (0, 256))])
def test_blocks_of_flex_attention_hold_what_is_seen(window: int | None, starts: tuple[tuple[int, ...], ...]) -> None:
    n = 500
    mask = make_block_mask(Packing((0, n), Documents(starts, n), window), CPU)
    rows = torch.arange(n)
    padded = torch.nn.functional.pad(rows, (0, 12), value=n).unflatten(0, (4, 128))
    for sequence in range(len(starts)):
        seen = mask.mask_mod(torch.tensor(sequence), torch.tensor(0), rows[:, None], rows)
        first = Documents(starts, n).first_rows(CPU)[sequence][:, None]
        lowest = first if window is None else first.maximum(rows[:, None] - window + 1)
        assert torch.equal(seen, (rows <= rows[:, None]) & (rows >= lowest))
        for q in range(4):
            at = padded[q][padded[q] < n]
            partial = set(mask.kv_indices[sequence, 0, q, : mask.kv_num_blocks[sequence, 0, q]].tolist())
            assert mask.full_kv_indices is not None
            assert mask.full_kv_num_blocks is not None
            full = set(mask.full_kv_indices[sequence, 0, q, : mask.full_kv_num_blocks[sequence, 0, q]].tolist())
            for k in range(4):
                of = padded[k][padded[k] < n]
                block = seen[at][:, of]
                assert k in full or not block.all() or k in partial
                assert block.all() or k not in full
                assert (k in full or k in partial) == bool(block.any())


def test_flex_attention_takes_what_it_is_given() -> None:
    """Forward only, which is all that torch computes of it on a CPU; uncompiled."""

    def attend(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Any, scale: float) -> Any:
        out, aux = flex_attention(q, k, v, score_mod, mask, scale, True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    q, k, v = (torch.randn(1, heads, 150, 16) for heads in (4, 2, 2))
    block = AttentionBlock(Heads(q, k, v), (0, 150), (0, 150), Scores(0.3, 40, 0.5), Documents(((0, 70),), 150))
    wanted = BlockAttention().forward(block)
    assert wanted is not None
    found = FlexKernel(0.5, attend).forward_packed(block.heads, block.packing, 0.3)
    assert max((a - b).abs().max() for a, b in zip(found, wanted, strict=True)) < 1e-5


def test_flex_attention_stays_compiled_for_more_forms_than_torch_keeps_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind torch's limit it would compute scores of all pairs, and only say so in the log."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    cuda_kernels._compiled.cache_clear()
    counters.clear()
    with compiler_config().patch(recompile_limit=3):
        for n in range(16, 21):
            q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
            cuda_kernels.attend_compiled(q, k, v, None, None, 0.3)
    cuda_kernels._compiled.cache_clear()
    assert counters["stats"]["unique_graphs"] == 5


@pytest.mark.parametrize(("softcap", "expected"), [(None, (CudnnFlash, CudaFlash)), (30.0, (FlexKernel, TileKernel))])
def test_nothing_is_built_for_documents_that_begin_on_another_rank(
    softcap: float | None, expected: tuple[type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pieces are of other sizes in each microbatch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(BlockAttention, "_works", lambda *_: True)
    q, k, v = (torch.empty(1, 2, 20, 16, dtype=torch.bfloat16) for _ in range(3))
    q = SimpleNamespace(device=CUDA, dtype=q.dtype, shape=q.shape)  # type: ignore[assignment]
    scores, documents = Scores(0.3, softcap=softcap), Documents(((0, 13, 31),), 40)

    def choose(k_rows: tuple[int, int], documents: Documents | None) -> type:
        return type(BlockAttention()._kernel(AttentionBlock(Heads(q, k, v), (20, 40), k_rows, scores, documents)))

    assert (choose((0, 20), None), choose((0, 20), documents)) == expected
    assert {choose((20, 40), each) for each in (None, documents)} == {expected[0]}


def test_a_kernel_that_is_wrong_on_a_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tiles would be ten times slower, and nobody would know. cuDNN gives way to flash attention, and is heard."""
    monkeypatch.setattr(block_attention, "find_fault", lambda *_: "is wrong by 0.3")
    attention = BlockAttention()
    assert not attention._works(CudnnFlash(), CUDA, torch.bfloat16)
    assert caplog.messages == ["attention on cuda in bfloat16 runs without CudnnFlash, which is wrong by 0.3"]
    for kernel in (CudaFlash(), FlexKernel(30.0)):
        with pytest.raises(
            ModelError, match=r"is wrong by 0\.3\. model.attention=sdpa leaves attention to transformers"
        ):
            attention._works(kernel, CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "softcap", "expected"),
    [((9, 0), None, [CudnnFlash, CudaFlash]), ((8, 0), None, [CudaFlash]), ((9, 0), 30.0, [FlexKernel])],
)
def test_kernels_are_chosen_by_device_and_form(
    capability: tuple[int, int], softcap: float | None, expected: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [type(each) for each in BlockAttention()._candidates(CUDA, softcap)] == expected
    assert [type(each) for each in BlockAttention()._candidates(CPU, softcap)] == (
        [CpuFlash] if softcap is None else []
    )


def test_a_masked_piece_on_cuda_is_computed_by_tiles() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 5, 5).masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    wanted = TileKernel().forward(Heads(q, k, v), PieceKind.MASKED, mask, 0.3)
    for kernel in (CudaFlash(), CudnnFlash()):
        found = kernel.forward(Heads(q, k, v), PieceKind.MASKED, mask, 0.3)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
