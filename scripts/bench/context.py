"""Our context parallelism beside plain forms of the same methods and DDP, step by step: interleave.py has the method.

    python scripts/bench/context.py --rounds 9                        2k, 4k and 16k tokens, two ranks, every side
    python scripts/bench/context.py --cases 1x2048 --sides ddp ring    the first of the sides is what ratios are over
    python scripts/bench/context.py --json ratios.json                the ratios' medians, by case and side
    python scripts/bench/context.py --profile ring --cases 1x4096      what one rank's time goes into, by operator
    python scripts/bench/context.py --memory --ranks 4 --cases 1x32768 peak memory of attention alone, beside one rank's

A Llama of hidden 256, 2 layers, 8 heads of 32, 4 key-value heads, vocabulary 2048. All sides take the same sequences in a step,
one for each rank: `ddp` a whole one on each rank, the others a share of all of them on every rank. Every side: sdpa's kernels,
fused AdamW, decay on matrices only, no clipping. The losses of each step agree to 1e-5, else the bench ends with an error.
  ddp          Hugging Face's model in DistributedDataParallel
  dp           ours without context parallelism, zero.stage 0: a whole sequence on each rank
  contiguous   the model in DDP, its attention written here: rank i holds the i-th part of a sequence; K and V are gathered
               (their gradients reduce-scattered) and sdpa gets the mask of its rows
  zigzag       the same with two chunks on each rank, i and 2 ranks - 1 - i: causal work is equal on all ranks
  zigzagmerge  zigzag without masks: sdpa's kernel on the keys before a chunk and on the chunk itself, merged by log-sum-exps
  alltoall     plain Ulysses: all_to_all_single of q, k and v to whole sequences of some heads, and of the output back
  ring, ulysses, gather    ours: parallel.context of a run as `meshwright train` builds it
"""

import argparse
import ctypes
import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from expert import TakesAll, find_ratios
from interleave import (
    WARMUP_ROUNDS,
    Case,
    Loop,
    Ours,
    Setting,
    Side,
    join,
    measure,
    profile,
    read_status,
    run_ranks,
    save_weights,
    stock_model,
    table,
    title,
    wrap_ddp,
)
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from framework.comm.connect import Mesh
from framework.comm.objects import all_gather_object
from framework.data.pack import Microbatch
from framework.mesh.token_layout import ContextSlices
from framework.parallel.attention.attention import ContextAttention
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.visible_rows import Scores
from framework.recipe.schema import Parallel, Zero

MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 2048,
    "max_position_embeddings": 1 << 17,
    "tie_word_embeddings": False,
}
CASES = [Case(1, 1, 2048), Case(1, 1, 4096), Case(1, 1, 16384)]
PLAIN = ["contiguous", "zigzag", "zigzagmerge", "alltoall"]
OURS = ["ring", "ulysses", "gather"]
SIDES = ["ddp", "dp", *PLAIN, *OURS]
LOSS_TOLERANCE = 1e-5

# q [B, H, n, D], k and v [B, Hk, n, D] of this rank's tokens to [B, H, n, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class GatherRanks(torch.autograd.Function):
    """[...] of each rank to [ranks, ...]; the gradient of a rank's part is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        gathered = own.new_empty(dist.get_world_size(), *own.shape)
        dist.all_gather_single(gathered.flatten(0, 1), own.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        own = torch.empty_like(gradient[0])
        dist.reduce_scatter_single(own, gradient.flatten(0, 1))
        return own


class AllToAll(torch.autograd.Function):
    """[ranks, ...]: part i goes to rank i, and what comes from rank i is part i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        parts = torch.empty_like(gradient)
        dist.all_to_all_single(parts, gradient)
        return parts


class MergedAttention(torch.autograd.Function):
    """Causal attention of the last rows of a sequence: sdpa's kernel on the keys before them and on their own, merged."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        blocks = _blocks(q, k)
        outs, sums = zip(
            *(kernel(q, k[:, :, rows], v[:, :, rows], 0.0, causal) for rows, causal in blocks), strict=True
        )
        log_sum = torch.logsumexp(torch.stack(sums), 0)
        out = sum(each * (own - log_sum).exp()[..., None] for each, own in zip(outs, sums, strict=True))
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, log_sum = ctx.saved_tensors
        parts = [
            kernel(gradient, q, k[:, :, rows], v[:, :, rows], out, log_sum, 0.0, causal)
            for rows, causal in _blocks(q, k)
        ]
        dq = sum(part[0] for part in parts)
        return dq, torch.cat([part[1] for part in parts], 2), torch.cat([part[2] for part in parts], 2)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[slice, bool]]:
    """Keys before the rows of q, which it sees whole, and those of the same rows, which it sees causally."""
    before = k.shape[2] - q.shape[2]
    return [(slice(0, before), False), (slice(before, None), True)]


def merge_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q, the last rows of those of k and v, without a mask."""
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    group = q.shape[1] // k.shape[1]
    return MergedAttention.apply(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


class MaskedRows:
    """Causal attention of q, the last rows of those of k and v, by a mask, which is made once for each pair of lengths."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, keys = q.shape[2], k.shape[2]
        if rows == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if (rows, keys) not in self._masks:
            self._masks[rows, keys] = torch.full((rows, keys), -torch.inf).triu_(keys - rows + 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._masks[rows, keys], enable_gqa=True)


class Contiguous:
    """Rank i holds the i-th part of a sequence."""

    def __init__(self, world: int, rank: int):
        self._rank, self._attend = rank, MaskedRows()
        self.order = list(range(world))  # parts of a sequence, by rank

    def rows(self, context: int) -> Tensor:
        return torch.arange(context).chunk(len(self.order))[self._rank]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = GatherRanks.apply(torch.stack([k, v])).movedim(0, 3).flatten(3, 4)
        stop = (self._rank + 1) * q.shape[2]
        return self._attend(q, k[:, :, :stop], v[:, :, :stop])


class Zigzag:
    """Rank i holds chunks i and 2 world - 1 - i of a sequence."""

    def __init__(self, world: int, rank: int, attend: Attend):
        self._world, self._chunks, self._attend = world, (rank, 2 * world - 1 - rank), attend

    def rows(self, context: int) -> Tensor:
        chunks = torch.arange(context).chunk(2 * self._world)
        return torch.cat([chunks[chunk] for chunk in self._chunks])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        halves = GatherRanks.apply(torch.stack([k, v])).chunk(2, dim=-2)  # of each [world, 2, B, Hk, chunk, D]
        in_order = [*halves[0], *reversed(halves[1].unbind())]
        outs = []
        for chunk, own in zip(self._chunks, q.chunk(2, dim=2), strict=True):
            keys, values = torch.cat(in_order[: chunk + 1], dim=-2)
            outs.append(self._attend(own, keys, values))
        return torch.cat(outs, dim=2)


class PlainUlysses:
    """Rank i holds the i-th part of a sequence, and all rows of the i-th part of the heads while attention lasts."""

    def __init__(self, world: int, rank: int):
        self._world, self._rank = world, rank

    def rows(self, context: int) -> Tensor:
        return torch.arange(context).chunk(self._world)[self._rank]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self._to_heads(each) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        parts = out.unflatten(2, (self._world, -1)).movedim(2, 0).contiguous()
        return AllToAll.apply(parts).movedim(0, 1).flatten(1, 2)

    def _to_heads(self, each: Tensor) -> Tensor:
        """[B, H, n, D] to [B, H / world, world n, D]."""
        parts = each.unflatten(1, (self._world, -1)).movedim(1, 0).contiguous()
        return AllToAll.apply(parts).movedim(0, 2).flatten(2, 3)


class PlainContext(Loop):
    """The loop that everyone writes, on this rank's rows of all sequences, with an attention function of its own."""

    def __init__(self, name: str, setting: Setting, method: Contiguous | Zigzag | PlainUlysses):
        self._name, self._rows = f"bench_{name}", method.rows(setting.case.context)

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
            return method(q, k, v).transpose(1, 2).contiguous(), None

        AttentionInterface.register(self._name, attend)
        super().__init__(setting, wrap_ddp)

    def load(self, setting: Setting) -> PreTrainedModel:
        return stock_model(setting, attn_implementation=self._name)

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        rows = self._rows
        own = [Microbatch(each.input_ids[:, rows], each.labels[:, rows], rows[None]) for each in microbatches]
        return super().step(own)


class OurAttention:
    """ContextAttention alone, without a run around it."""

    def __init__(self, setting: Setting, mesh: Mesh, name: str):
        world, alone, context = mesh.axis("world"), mesh.axis("tp"), setting.case.context
        ulysses, ring = (world, alone) if name == "ulysses" else (alone, world)
        slices = ContextSlices(context, ulysses.size, ring.size, setting.rank)
        self._attention = ContextAttention(
            slices, ulysses, ring, "gather" if name == "gather" else "ring", BlockAttention()
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention(q, k, v, Scores(q.shape[-1] ** -0.5)).transpose(1, 2)


def build_plain(name: str, world: int, rank: int) -> Contiguous | Zigzag | PlainUlysses:
    """The attention of a side that is written here."""
    match name:
        case "contiguous":
            return Contiguous(world, rank)
        case "alltoall":
            return PlainUlysses(world, rank)
    return Zigzag(world, rank, MaskedRows() if name == "zigzag" else merge_blocks)


def build_side(name: str, setting: Setting, mesh: Mesh, tokens: Tensor) -> Side:
    world = setting.world
    if name == "ddp":
        return Loop(setting, wrap_ddp)
    if name == "dp":
        return Ours(setting, mesh, Zero(stage=0))
    if name in PLAIN:
        return TakesAll(PlainContext(name, setting, build_plain(name, world, setting.rank)), setting, tokens)
    together = replace(setting, tp=world, case=replace(setting.case, sequences=world * setting.case.sequences))
    parallel = Parallel(cp=world, context=name)  # type: ignore[arg-type]
    return TakesAll(Ours(together, mesh, Zero(stage=0), parallel), setting, tokens)


def measure_attention(setting: Setting, name: str, rendezvous: str, results: Path) -> None:
    """One rank: the peak resident memory of one forward and backward of attention over what there was before, in bytes, after one
    that fills torch's caches; rank 0 writes those of all. Counted are q, k, v, the output, their gradients and all in between."""
    mesh = join(setting, rendezvous)
    attend: Attend = whole_attention
    if setting.world > 1:
        attend = OurAttention(setting, mesh, name) if name in OURS else build_plain(name, setting.world, setting.rank)
    differentiate_once(attend, setting)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    differentiate_once(attend, setting)
    found = all_gather_object(read_status("VmHWM") - before, mesh.axis("world"))
    if setting.rank == 0:
        results.write_text(json.dumps(found))
    mesh.close()


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def differentiate_once(attend: Attend, setting: Setting) -> None:
    """Forward and backward of this rank's share of one sequence, its tensors in the order of projections. As in a model, nothing
    but attention holds q, k and v, and the projection behind it holds the output until its own backward has ended."""
    model, rows = setting.model, setting.case.context // setting.world
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    size = model["hidden_size"] // heads
    source, weight = torch.zeros((), requires_grad=True), torch.randn(1, heads * size, requires_grad=True)
    inputs = (torch.randn(1, rows, number, size).add_(source) for number in (heads, kv_heads, kv_heads))
    out = attend(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    F.linear(out.flatten(2), weight).sum().backward()


def print_attention_memory(setting: Setting, names: Sequence[str], ranks: int) -> None:
    """Each side in ranks of its own, beside sdpa on one rank."""
    (alone,) = run_ranks(measure_attention, replace(setting, world=1), "sdpa")
    print("| side | ranks | peak MiB of each rank | one rank's over the largest |\n|---|---|---|---|")
    print(f"| sdpa | 1 | {alone / 2**20:.0f} | 1 |", flush=True)
    for name in names:
        found = run_ranks(measure_attention, replace(setting, world=ranks), name)
        peaks = ", ".join(f"{each / 2**20:.0f}" for each in found)
        print(f"| {name} | {ranks} | {peaks} | {alone / max(found):.2f} |", flush=True)


def check_losses(losses: dict[str, list[float]]) -> None:
    """End with an error if sides have other losses than the first."""
    (first, expected), *others = losses.items()
    for name, found in others:
        error = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, expected, strict=True))
        if not error <= LOSS_TOLERANCE:
            raise SystemExit(f"losses of {name} and {first} differ by {error:.0e}: {found}, {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=CASES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None, help="where to write the ratios' medians, by case and side")
    parser.add_argument("--profile", choices=SIDES, default=None)
    parser.add_argument("--memory", action="store_true", help="of one layer's attention alone, without a model")
    parser.add_argument("--kv-heads", type=int, default=MODEL["num_key_value_heads"])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} rounds")
    model = MODEL | {"num_hidden_layers": options.layers, "num_key_value_heads": options.kv_heads}
    against, ratios = options.sides[0], {}
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights, model)
        for case in options.cases:
            steps = WARMUP_ROUNDS + options.rounds
            setting = Setting(case, options.ranks, 0, steps, None, weights, "", model=model)
            print(f"\n{case}, {options.layers} layers, {options.ranks} ranks", flush=True)
            if options.memory:
                print_attention_memory(setting, [name for name in options.sides if name in OURS], options.ranks)
                continue
            if options.profile is not None:
                print(run_ranks(profile, setting, build_side, options.profile))
                continue
            measured = run_ranks(measure, setting, build_side, options.sides)
            check_losses(measured["losses"])
            print("\n".join([title(against), *table(setting, measured, against, LOSS_TOLERANCE)]), flush=True)
            ratios[str(case)] = find_ratios(measured, against)
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=2) + "\n")


if __name__ == "__main__":
    main()
