"""Attention of one sequence, forward and backward: `BlockAttention` beside what transformers runs without it.

    python scripts/bench/attention.py [--tokens 2048 4096 16384] [--dtype float32]

Stock is F.scaled_dot_product_attention as transformers' sdpa calls it (causal without a mask; windows and packed documents with a
mask of S x S), and for a soft cap its eager attention, because sdpa has none. 8 heads of 64, one thread. Both take turns;
milliseconds of CPU time, the best of the rounds, because other processes may share the core. What needs S x S in stock stops at
4096 tokens there.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.parallel.attention.block_attention import AttentionBlock, BlockAttention
from framework.parallel.attention.kernels import Heads, Result
from framework.parallel.attention.visible_rows import Documents, Scores

HEADS, HEAD_SIZE, SCALE = 8, 64, 0.125
LONGEST_SQUARE = 4096
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    kv_heads: int = HEADS
    window: int | None = None
    softcap: float | None = None
    document: int | None = None

    def documents(self, tokens: int) -> Documents | None:
        return None if self.document is None else Documents((tuple(range(0, tokens, self.document)),), tokens)

    def mask(self, tokens: int) -> Tensor | None:
        """[S, S] of booleans, where a model's mask is not just causal."""
        if self.window is None and self.document is None:
            return None
        rows = torch.arange(tokens)
        lowest = rows - self.window + 1 if self.window is not None else rows - rows % (self.document or tokens)
        return (rows <= rows[:, None]) & (rows >= lowest[:, None])


CASES = (
    Case("causal"),
    Case("causal, 2 kv heads", kv_heads=2),
    Case("window of 1024", kv_heads=2, window=1024),
    Case("documents of 500", kv_heads=2, document=500),
    Case("soft cap", kv_heads=4, softcap=50.0),
)


def attend_stock(case: Case, heads: Tensors, mask: Tensor | None) -> Tensor:
    q, k, v = heads
    if case.softcap is None:
        shares = case.kv_heads != HEADS
        is_causal = mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=SCALE, enable_gqa=shares)
    k, v = (x.repeat_interleave(HEADS // case.kv_heads, 1) for x in (k, v))
    scores = torch.tanh(q @ k.mT * SCALE / case.softcap) * case.softcap
    ahead = torch.full(scores.shape[2:], torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return (scores + ahead).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def sides(case: Case, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Forward and backward of each side. Tokens lie before heads, as projections leave them."""
    q, k, v, gradient = (
        torch.randn(1, tokens, heads, HEAD_SIZE, dtype=dtype).transpose(1, 2)
        for heads in (HEADS, case.kv_heads, case.kv_heads, HEADS)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    rows, documents, attention = (0, tokens), case.documents(tokens), BlockAttention()
    scores = Scores(SCALE, case.window, case.softcap)

    def ours() -> object:
        block = AttentionBlock(Heads(q, k, v), rows, rows, scores, documents)
        found = attention.forward(block)
        assert found is not None
        return attention.backward(block, Result(*found, gradient))

    needs_square = case.window is not None or case.document is not None or case.softcap is not None
    if needs_square and tokens > LONGEST_SQUARE:
        return {"ours": ours}
    mask = case.mask(tokens)

    def stock() -> object:
        out = attend_stock(case, (leaves[0], leaves[1], leaves[2]), mask)
        return torch.autograd.grad(out, leaves, gradient)

    return {"stock": stock, "ours": ours}


def measure(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taking turns."""
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(rounds + 1):
        for name, run in forms.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| attention | tokens | stock ms | ours ms | ours / stock |\n|---|---|---|---|---|")
    for tokens in options.tokens:
        for case in CASES:
            taken = measure(sides(case, tokens, getattr(torch, options.dtype)), max(2, 12 * 2048 // tokens))
            stock, ours = taken.get("stock"), taken["ours"]
            beside = "| - " if stock is None else f"| {stock:.0f} "
            ratio = "-" if stock is None else f"{ours / stock:.2f}"
            print(f"| {case.name} | {tokens} {beside}| {ours:.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
