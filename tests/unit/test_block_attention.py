"""Attention in blocks and pieces is the softmax over the whole sequence, forward and backward, in memory linear in its length."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from framework.mesh.token_layout import Interval
from framework.parallel.attention.block_attention import AttentionBlock, BlockAttention, find_fault
from framework.parallel.attention.kernels import CpuFlash, Heads, Result, TileKernel
from framework.parallel.attention.visible_rows import Documents, PieceKind, Scores, cut_pieces, find_pieces
from tests.visible_pairs import documents_of, visible_pairs

B, H, S, D = 2, 4, 64, 8
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A call of attention: what differs from plain causal attention of 4 heads of 8."""

    window: int | None = None
    softcap: float | None = None
    documents: tuple[int, ...] = ()
    kv_heads: int = H
    value_size: int = D
    sinks: bool = False

    @property
    def scores(self) -> Scores:
        return Scores(0.3, self.window, self.softcap)

    @property
    def packed(self) -> Documents | None:
        first = self.first_rows()
        return None if first is None else documents_of(first)

    def first_rows(self) -> Tensor | None:
        """[B, S]: documents of the lengths given, in turn; the second sequence begins with another one."""
        if not self.documents:
            return None
        first = torch.zeros(B, S, dtype=torch.long)
        for sequence in range(B):
            row = 0
            for length in itertools.islice(itertools.cycle(self.documents), sequence, None):
                first[sequence, row : row + length] = row
                row += length
                if row >= S:
                    break
        return first


FEATURES = (
    ("window", 20),
    ("window", 5),
    ("softcap", 2.0),
    ("documents", (30, 3, 9)),
    ("documents", (1, 2, 3)),
    ("kv_heads", 2),
    ("value_size", 5),
    ("value_size", 12),
    ("sinks", True),
)
ALONE = [Case(**{name: value}) for name, value in FEATURES]  # type: ignore[arg-type]
IN_PAIRS = [
    Case(**dict(pair))  # type: ignore[arg-type]
    for pair in itertools.combinations(FEATURES, 2)
    if pair[0][0] != pair[1][0]
]
# Zig-zag chunks of two ranks and of one, and cuts that no tile and no document knows.
CUTS = ((0, 16, 32, 48, 64), (0, 64), (0, 7, 40, 64))


def draw(case: Case, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, gradient of out)"""
    torch.manual_seed(1)
    shapes = (H, D), (case.kv_heads, D), (case.kv_heads, case.value_size), (H, case.value_size)
    q, k, v, gradient = (torch.randn(B, heads, S, size, dtype=dtype) for heads, size in shapes)
    return q, k, v, gradient


def attend_plainly(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, which pairs are seen [B, S, S]), through scores of S x S."""
    k, v = (x.repeat_interleave(H // case.kv_heads, 1) for x in (k, v))
    rows = torch.arange(S)
    scores = q @ k.mT * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    first = case.first_rows()
    lowest = torch.zeros(B, S) if first is None else first
    if case.window is not None:
        lowest = torch.maximum(lowest, rows - case.window + 1)
    seen = (rows <= rows[:, None]) & (rows >= lowest[..., None])
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        # Sinks are scores of a key without a value.
        scores = torch.cat([scores, sinks[None, :, None, None].expand(B, H, S, 1)], -1)
    return scores.softmax(-1)[..., :S] @ v, seen


class Blocks:
    """Attention of a whole sequence, block by block."""

    def __init__(self, case: Case, cuts: tuple[int, ...], attention: BlockAttention) -> None:
        self.case, self.attention, self.packed = case, attention, case.packed
        self.blocks = list(itertools.product(itertools.pairwise(cuts), repeat=2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(B, H, S, self.case.value_size, dtype=wide)
        start = q.new_full((H,), -math.inf) if sinks is None else sinks
        log_sum = start[:, None].expand(B, H, S).to(wide).clone()
        for a, b in self.blocks:
            at, of = slice(*a), slice(*b)
            heads = Heads(q[:, :, at], k[:, :, of], v[:, :, of])
            found = self.attention.forward(AttentionBlock(heads, a, b, self.case.scores, self.packed))
            assert (found is None) == (visible_pairs(a, b, self.case.scores, self.packed) == 0)
            if found is not None:
                both = torch.logaddexp(log_sum[:, :, at], found[1])
                old, new = ((x - both).nan_to_num(nan=-math.inf).exp() for x in (log_sum[:, :, at], found[1]))
                out[:, :, at] = out[:, :, at] * old[..., None] + found[0] * new[..., None]
                log_sum[:, :, at] = both
        return out, log_sum

    def backward(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor) -> Gradients:
        dq, dk, dv = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        for a, b in self.blocks:
            at, of = slice(*a), slice(*b)
            heads = Heads(q[:, :, at], k[:, :, of], v[:, :, of])
            result = Result(out[:, :, at], log_sum[:, :, at], gradient[:, :, at])
            found = self.attention.backward(AttentionBlock(heads, a, b, self.case.scores, self.packed), result)
            if found is not None:
                dq[:, :, at] += found[0]
                dk[:, :, of] += found[1]
                dv[:, :, of] += found[2]
        return dq, dk, dv


def compare(case: Case, cuts: tuple[int, ...], attention: BlockAttention, dtype: torch.dtype = torch.double) -> float:
    """The largest difference of out and the three gradients from the plain softmax."""
    q, k, v, gradient = draw(case, dtype)
    sinks = torch.linspace(-1, 1, H, dtype=dtype) if case.sinks else None
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    plain, _ = attend_plainly(case, *leaves, None if sinks is None else sinks.double())
    wanted = [plain, *torch.autograd.grad(plain, leaves, gradient.double())]
    blocks = Blocks(case, cuts, attention)
    out, log_sum = blocks.forward(q, k, v, sinks)
    found = [out, *blocks.backward(gradient, q, k, v, out, log_sum)]
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("case", [Case(), *ALONE], ids=str)
def test_blocks_are_the_softmax_over_the_sequence(case: Case, cuts: tuple[int, ...]) -> None:
    assert compare(case, cuts, BlockAttention(tile=16)) < 1e-12
    assert compare(case, cuts, BlockAttention()) < 1e-12


@pytest.mark.parametrize("case", IN_PAIRS, ids=str)
def test_features_in_pairs(case: Case) -> None:
    assert compare(case, CUTS[2], BlockAttention(tile=16)) < 1e-12


@pytest.mark.parametrize("case", [Case(), *ALONE], ids=str)
def test_the_tile_kernel_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a device without flash attention."""
    monkeypatch.setattr("framework.parallel.attention.block_attention.FLASH", {})
    assert compare(case, CUTS[0], BlockAttention(tile=8)) < 1e-12
    assert compare(case, CUTS[2], BlockAttention()) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("case", [Case(), *ALONE], ids=str)
def test_narrow_dtypes(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    assert compare(case, CUTS[0], BlockAttention(tile=16), dtype) < tolerance


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 70),
    q=st.tuples(st.integers(0, S - 1), st.integers(1, S)),
    k=st.tuples(st.integers(0, S - 1), st.integers(1, S)),
    tile=st.sampled_from((4, 16, 64)),
    is_cut=st.booleans(),
)
@settings(deadline=None)
def test_pieces_hold_exactly_the_pairs_that_are_seen(
    lengths: list[int], window: int | None, q: Interval, k: Interval, tile: int, is_cut: bool
) -> None:
    case = Case(window=window, documents=tuple(lengths))
    q_rows, k_rows = ((rows[0], min(rows[0] + rows[1], S)) for rows in (q, k))
    packed = case.packed
    _, seen = attend_plainly(case, *draw(case)[:3], None)
    block = seen[:, slice(*q_rows), slice(*k_rows)]
    assert visible_pairs(q_rows, k_rows, case.scores, packed) == block.sum()
    pieces = find_pieces(q_rows, k_rows, case.scores, packed, tile)
    covered = torch.zeros_like(seen)
    for piece in cut_pieces(pieces, tile) if is_cut else pieces:
        at = piece.sequence, slice(*piece.q), slice(*piece.k)
        here = {PieceKind.FULL: torch.ones_like(seen[at]), PieceKind.CAUSAL: torch.ones_like(seen[at]).tril()}
        mask = here.get(piece.kind, seen[at])
        assert mask.any(-1).all(), "a query of a piece sees none of its keys"
        assert not (covered[at] & mask).any(), "a pair in two pieces"
        covered[at] |= mask
        if piece.kind is PieceKind.MASKED:
            assert mask.numel() <= tile**2
    assert torch.equal(covered[:, slice(*q_rows), slice(*k_rows)], block)
    assert covered.sum() == block.sum()


def test_no_pieces_where_nothing_is_seen() -> None:
    case = Case()
    q, k, v, gradient = draw(case)
    later, log_sum = ((0, 64), (64, 128)), torch.zeros(B, H, S, dtype=torch.double)
    attention = BlockAttention()
    block = AttentionBlock(Heads(q, k, v), *later, case.scores)
    assert attention.forward(block) is None
    assert attention.backward(block, Result(gradient, log_sum, gradient)) is None
    behind = replace(block, k_rows=(0, 64), scores=replace(case.scores, window=64))
    assert attention.forward(replace(behind, q_rows=(127, 191))) is None
    assert attention.forward(replace(behind, q_rows=(126, 190))) is not None
    halves = Documents(((0, 64),), 128)
    assert attention.forward(AttentionBlock(Heads(q, k, v), (64, 128), (0, 64), case.scores, halves)) is None


def test_queries_that_see_none_of_the_keys_have_no_weight() -> None:
    case = Case(documents=(30, 34))
    q, k, v, _ = draw(case)
    heads = Heads(q, k[:, :, :16], v[:, :, :16])
    found = BlockAttention().forward(AttentionBlock(heads, (0, 64), (0, 16), case.scores, case.packed))
    assert found is not None
    out, log_sum = found
    assert (log_sum[0, :, 30:] == -math.inf).all()
    assert (out[0, :, 30:] == 0).all()
    assert log_sum[0, :, :30].isfinite().all()


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor that any operation allocates, and of all views' storages alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return out


def draw_documents(lengths: Iterator[int], n: int) -> Documents:
    ends = itertools.takewhile(lambda end: end < n, itertools.accumulate(lengths))
    return Documents(((0, *ends),), n)


@pytest.mark.parametrize("kind", ["window", "short window", "documents", "softcap"])
def test_no_tensor_is_larger_than_a_tile_of_scores_or_the_tokens(kind: str) -> None:
    n, heads, tile = 8192, 2, 256
    window = {"window": 1000, "short window": 100, "softcap": 700}.get(kind)
    scores = Scores(0.3, window, 5.0 if kind == "softcap" else None)
    rng = random.Random(0)
    lengths = (rng.choice((20, 90, 400, 1500)) for _ in itertools.count())
    packed = draw_documents(lengths, n) if kind == "documents" else None
    q, k, v = (torch.randn(1, heads, n, 4) for _ in range(3))
    attention, sizes = BlockAttention(tile), Sizes()
    with sizes:
        block = AttentionBlock(Heads(q, k, v), (0, n), (0, n), scores, packed)
        found = attention.forward(block)
        assert found is not None
        attention.backward(block, Result(*found, q))
    assert sizes.largest <= heads * max(tile**2, 4 * n)


def test_a_kernel_that_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(CpuFlash):
        def forward(self, heads: Heads, *rest: Any) -> tuple[Tensor, Tensor]:
            out, log_sum = super().forward(heads, *rest)
            return out, log_sum * 1.01

    class Failing(CpuFlash):
        def backward(self, *_: Any) -> Gradients:
            raise RuntimeError("no kernel image")

    cpu = torch.device("cpu")
    assert find_fault(CpuFlash(), cpu, torch.float32) is None
    assert find_fault(TileKernel(), cpu, torch.float32) is None
    attention = BlockAttention()
    assert attention._works(CpuFlash(), cpu, torch.float32)
    assert not caplog.records
    for kernel in (Wrong(), Failing(), Failing()):
        assert not attention._works(kernel, cpu, torch.float32)
    assert [record.message for record in caplog.records] == [
        "attention on cpu in float32 runs without Wrong, which is wrong by 0.06",
        "attention on cpu in float32 runs without Failing, which fails: no kernel image",
    ]


def test_a_wrong_kernel_gives_way_to_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CpuFlash):
        def forward(self, heads: Heads, *rest: Any) -> tuple[Tensor, Tensor]:
            out, log_sum = super().forward(heads, *rest)
            return out * 2, log_sum

    monkeypatch.setattr("framework.parallel.attention.block_attention.FLASH", {"cpu": (Wrong(),)})
    assert compare(Case(kv_heads=2), CUTS[0], BlockAttention(tile=16)) < 1e-12


def test_heads_wider_than_a_kernel_takes_go_to_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's are of 512, FlashAttention-2 takes 256."""
    monkeypatch.setattr("framework.parallel.attention.block_attention.FLASH", {"cpu": (CpuFlash(widest=16),)})
    heads = [Heads(*(torch.zeros(1, 1, 4, width) for _ in range(3))) for width in (16, 17)]
    kernels = [BlockAttention()._kernel(AttentionBlock(each, (0, 4), (0, 4), Scores(1.0))) for each in heads]
    assert [type(kernel) for kernel in kernels] == [CpuFlash, TileKernel]


@pytest.mark.parametrize("ranks", [2, 4])
def test_zig_zag_ranks_have_equal_work(ranks: int) -> None:
    """Rank r has chunks r and 2 ranks - 1 - r."""
    chunk, tokens, scores = 512, 1024 * ranks, Scores(1.0)
    intervals = [(start, start + chunk) for start in range(0, tokens, chunk)]
    pairs = [visible_pairs(rows, (0, tokens), scores, None) for rows in intervals]
    of_rank = [first + last for first, last in zip(pairs[:ranks], reversed(pairs), strict=False)]
    assert sum(of_rank) == tokens * (tokens + 1) // 2
    assert max(of_rank) <= 1.02 * min(of_rank)
    assert pairs[-1] > 1.02 * pairs[0], "the same of contiguous chunks would pass"
