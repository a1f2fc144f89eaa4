"""Next-token loss as a local sum over a global count, so that every split of a batch adds up to the same number.

loss = (1 / N) * sum_i sum_{t in rank i} -log softmax(logits_t)[label_t],  N = loss tokens of the whole batch.

Nothing is averaged later: not over microbatches, not over ranks, however uneven their masks are.

Where the vocabulary is sharded over an axis, each rank has the logits z_r of its part, and no logits are sent:

    log sum_v exp z_v = m + log sum_r exp(m_r - m) s_r,    m_r = max z_r,  s_r = sum exp(z_r - m_r),  m = max_r m_r

needs two numbers for each token from every rank, and the label's logit a third. The gradient, softmax(z) - onehot, is local.

With a z-loss (Chowdhery et al. 2022, arXiv 2204.02311, section 5) of weight w each token adds w L^2, L = log sum_v exp z_v, which
keeps L near 0; the gradient is then (1 + 2 w L) softmax(z) - onehot.

GPUs read logits once in forward, in their own dtype, and overwrite them with their gradient in backward (`LOSS`).

Losses of other forms are made of these same numbers of single tokens: `objective.py`.

Where logits would be too large to exist at all, the head computes the loss in chunks of tokens: `chunked_loss.py`.

Shapes: B sequences of T tokens, N = B T; V the vocabulary size, V/tp a rank's part of it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.fused import Fused
from framework.mesh.layout import part
from framework.torch_private import log_softmax_backward_out

# Softmax statistics of n tokens: the largest logit, the sum of exponentials, the label's logit; [n] each.
Sums = tuple[Tensor, Tensor, Tensor]
IGNORE = -100
aten = torch.ops.aten
SUM = 2  # `reduction="sum"`, as ATen has it
# Elements of logits whose gradient is computed at a time on a CPU: 256 KiB in fp32 stay in its cache between two passes.
CPU_ELEMENTS = 1 << 16

# torch's operations compute this many chunks, unless they would be so small that their matmuls, and the passes over the weight's
# gradient between them, take longer than those of all tokens; or so large that they save nothing more worth having: 0.5 GB of
# fp32 logits for a vocabulary size of 128 k.
NUM_CHUNKS = 8
LEAST_CHUNK, LARGEST_CHUNK = 128, 1024
# Fused kernels have the logits of a chunk once, in their own dtype: of four times as many tokens, as many bytes.
LARGEST_FUSED_CHUNK, FUSED_CHUNK_BYTES = 4096, 1 << 30


def is_fused(device_type: str, itemsize: int) -> bool:
    """Whether a device has fused kernels for logits of so many bytes each."""
    return device_type == "cuda" and itemsize <= torch.float32.itemsize


def chunk_size(num_tokens: int, row_bytes: int, fused: bool) -> int:
    """Tokens per chunk, whose logits exist at a time, in the chunked form. row_bytes: of a token's logits on a rank."""
    if fused:
        most = FUSED_CHUNK_BYTES // row_bytes // LEAST_CHUNK * LEAST_CHUNK
        return min(max(most, LEAST_CHUNK), LARGEST_FUSED_CHUNK)
    return min(max(-(-num_tokens // NUM_CHUNKS), LEAST_CHUNK), LARGEST_CHUNK)


def chunk_bytes(num_tokens: int, vocabulary_local: int, itemsize: int, fused: bool) -> int:
    """Bytes of a chunk while its loss is computed: its logits, and what torch's operations make of them in at least fp32."""
    row_bytes = vocabulary_local * itemsize
    wide_bytes = 0 if fused else vocabulary_local * max(itemsize, torch.float32.itemsize)
    return chunk_size(num_tokens, row_bytes, fused) * (row_bytes + wide_bytes)


def token_loss(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    """Cross-entropy of this microbatch, divided by the token count of the whole batch: a scalar in at least fp32.

    logits: [B, T, V]; labels: [B, T] int64, already shifted (labels[:, t] is the target of input t), -100 = no loss;
    num_tokens: scalar, loss tokens of the whole batch over all microbatches and ranks. Communicates nothing.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = _WholeCrossEntropy.apply(logits.flatten(0, -2), labels.flatten())
    return total / num_tokens.clamp(min=1)


class _WholeCrossEntropy(torch.autograd.Function):
    """`F.cross_entropy` summed, bitwise, whose backward writes the gradient where the log-probabilities were. logits: [N, V];
    labels: [N] int64. The stock backward fills two more tensors of [N, V], in memory that is new to a CPU's page tables."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probability = F.log_softmax(logits, -1)
        ctx.save_for_backward(log_probability, labels)
        return F.nll_loss(log_probability, labels, ignore_index=IGNORE, reduction="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole, labels = ctx.saved_tensors
        rows = max(1, CPU_ELEMENTS // whole.shape[1]) if whole.device.type == "cpu" else len(whole)
        for log_probability, own in zip(whole.split(rows), labels.split(rows), strict=True):
            # Its last argument counts only for a mean.
            onehot = aten.nll_loss_backward(gradient, log_probability, own, None, SUM, IGNORE, gradient)
            dtype = log_probability.dtype
            log_softmax_backward_out(onehot, log_probability, -1, dtype, out=log_probability)
        return whole, None


class Loss(Protocol):
    """The loss of a stage with a head: call `expect` before the model's forward, and the loss with the logits that it returns."""

    def expect(self, labels: Tensor, z_loss: float = 0.0, finds_likeliest: bool = False) -> None:
        """Set the labels [B, T] of the next forward, the weight of its z-loss, and whether `likeliest` will be asked for."""

    def __call__(self, logits: Tensor, labels: Tensor, num_tokens: Tensor, z_loss: float = 0.0) -> Tensor:
        """`token_loss` of this microbatch, with its z-loss."""

    def likeliest(self, logits: Tensor) -> Tensor:
        """The likeliest next token of each, the first of equal ones: [B, T] int64."""

    def of_tokens(self, logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
        """-log p of each label, and its z-loss, 0 without one: [B, T] in at least fp32."""


@dataclass(frozen=True)
class TokenLoss:
    """`token_loss` where logits are sharded over `axis` along a vocabulary of size `vocabulary`.

    The result is the same on all ranks of `axis`, over which forward all-reduces 3 numbers for each token; backward communicates
    nothing, and overwrites sharded logits with their gradient.
    """

    axis: Communicator
    vocabulary: int

    def expect(self, labels: Tensor, z_loss: float = 0.0, finds_likeliest: bool = False) -> None:
        """Nothing to set: the loss is computed after the model's forward."""

    def __call__(self, logits: Tensor, labels: Tensor, num_tokens: Tensor, z_loss: float = 0.0) -> Tensor:
        """The loss, a scalar in at least fp32. logits: [B, T, V/tp] in compute dtype; labels, num_tokens: as in `token_loss`."""
        if self.axis.size == 1 and find_kernel(logits) is LOSS.plain and not z_loss:
            return token_loss(logits, labels, num_tokens)
        return self.of_tokens(logits, labels, z_loss).sum() / num_tokens.clamp(min=1)

    def of_tokens(self, logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
        """-log p of each label, and its z-loss, 0 without one: [B, T] in at least fp32. logits, labels: as in `__call__`."""
        start, stop = part(self.vocabulary, self.axis.rank, self.axis.size)
        assert logits.shape[-1] == stop - start, f"{logits.shape[-1]} logits for the vocabulary's [{start}, {stop})"
        flat, kernel = logits.flatten(0, -2), find_kernel(logits)
        losses: Tensor = _CrossEntropy.apply(flat, labels.flatten(), start, self.axis, kernel, z_loss)
        return losses.view(labels.shape)

    def likeliest(self, logits: Tensor) -> Tensor:
        """The likeliest next token of each, [B, T]. Over `axis` 2 numbers for each token are all-reduced."""
        start, _ = part(self.vocabulary, self.axis.rank, self.axis.size)
        return choose_likeliest(*find_largest(logits, start), self.axis)


def find_largest(logits: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The largest logit of a rank's part of the vocabulary, in at least fp32, and the first id that has it: [...] each.
    logits: [..., V/tp]; start: the part's first id."""
    largest, index = logits.max(-1)
    return largest.to(torch.promote_types(largest.dtype, torch.float32)), index + start


def choose_likeliest(largest: Tensor, ids: Tensor, axis: Communicator) -> Tensor:
    """The id of the largest logit of the whole vocabulary, the first of equal ones, as argmax has it in one process.
    largest, ids: of `find_largest` on each rank of `axis`."""
    most, ids = largest.clone(), ids.clone()
    all_reduce(most, axis, "max")
    ids[largest != most] = torch.iinfo(ids.dtype).max
    all_reduce(ids, axis, "min")
    return ids


class _CrossEntropy(torch.autograd.Function):
    """The losses of N tokens, [N]. logits: [N, V/tp]; labels: [N] int64, of the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        start: int,
        axis: Communicator,
        kernel: "TorchLoss",
        z_loss: float,
    ) -> Tensor:
        sums = LocalSums.make(labels, logits)
        kernel.read(logits, labels, start, sums.of(slice(None)))
        log_sum, losses = sums.combine(axis, z_loss)
        ctx.start, ctx.kernel, ctx.z_loss = start, kernel, z_loss
        ctx.save_for_backward(logits, labels, log_sum)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sum = ctx.saved_tensors
        weight = gradient * (labels != IGNORE)
        # In place: a second tensor of [N, V/tp] would be the largest of the whole step.
        scale = softmax_scale(log_sum, ctx.z_loss)
        ctx.kernel.differentiate(logits, labels, ctx.start, log_sum, weight, logits, scale)
        return logits, None, None, None, None, None


@dataclass(frozen=True)
class LocalSums:
    """The numbers that the loss of N tokens needs from one rank's logits, in at least fp32; each is [N]."""

    maxima: Tensor  # max z_r
    sums: Tensor  # sum exp(z_r - max z_r)
    targets: Tensor  # the label's logit, 0 if another rank has it
    labels: Tensor

    @classmethod
    def make(cls, labels: Tensor, like: Tensor) -> "LocalSums":
        """Empty sums for labels [N]. like: a tensor of the same device, and of the dtype that is widened."""
        wide_dtype = torch.promote_types(like.dtype, torch.float32)
        maxima, sums, targets = like.new_empty(3, len(labels), dtype=wide_dtype)
        return cls(maxima, sums, targets, labels)

    def of(self, rows: slice) -> Sums:
        """The numbers of some tokens, for a kernel to write."""
        return self.maxima[rows], self.sums[rows], self.targets[rows]

    def combine(self, axis: Communicator, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """log sum_v exp z_v, and the loss, 0 without a label: [N] each; over `axis` 3 N numbers are all-reduced. z_loss: its
        weight."""
        # A collective of its own before the sum: each rank's part is rescaled to the maximum of all ranks, or exp would overflow.
        maximum = self.maxima.clone()
        all_reduce(maximum, axis, "max")
        both = torch.stack([self.sums * (self.maxima - maximum).exp(), self.targets])
        all_reduce(both, axis)
        log_sum = maximum + both[0].log()
        losses = log_sum - both[1]
        if z_loss:
            losses += z_loss * log_sum.square()
        return log_sum, losses * (self.labels != IGNORE)


def softmax_scale(log_sum: Tensor, z_loss: float) -> Tensor | None:
    """Factor of each token's softmax in the gradient, [n], from its log sum exp z; None: 1."""
    return 1 + 2 * z_loss * log_sum if z_loss else None


class TorchLoss:
    """The passes over one rank's logits z [n, V/tp] of n tokens, by torch's operations: for any device and dtype. labels: [n]
    int64, of the whole vocabulary; start: where the rank's part of it begins."""

    def read(self, logits: Tensor, labels: Tensor, start: int, sums: Sums) -> None:
        """Write max z, sum exp(z - max z) and z[label], or 0 where the label is another rank's, to `sums`."""
        maxima, totals, targets = sums
        places, is_mine = find_places(labels, start, logits.shape[-1])
        maxima.copy_(logits.amax(-1))
        targets.copy_(logits.gather(-1, places[:, None]).squeeze(-1)).masked_fill_(~is_mine, 0)
        # Wide by the maxima: numbers of 16 bits are widened on the way.
        totals.copy_((logits - maxima[:, None]).exp_().sum(-1))

    def differentiate(
        self,
        logits: Tensor,
        labels: Tensor,
        start: int,
        log_sum: Tensor,
        weight: Tensor,
        out: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Write weight (scale softmax(z) - onehot) to `out`, [n, V/tp], which may be `logits`. log_sum, weight, scale: [n], at
        least fp32."""
        places, is_mine = find_places(labels, start, logits.shape[-1])
        is_wide = out.dtype == log_sum.dtype
        probability = torch.sub(logits, log_sum[:, None], out=out if is_wide else None).exp_()
        if scale is not None:
            probability.mul_(scale[:, None])
        probability.scatter_add_(-1, places[:, None], -is_mine[:, None].to(log_sum.dtype))
        probability.mul_(weight[:, None])
        if not is_wide:
            out.copy_(probability)


def find_kernel(logits: Tensor) -> TorchLoss:
    """The kernel for logits of this device and dtype."""
    return LOSS.on(logits.device) if logits.dtype != torch.float64 else LOSS.plain


def _load_triton() -> Any:
    from framework.model.triton_kernels import TritonLoss

    return TritonLoss()


def _compute_example(kernel: TorchLoss, device: torch.device) -> list[Tensor]:
    """Statistics and gradients of a few tokens, of which one has no loss and some have another rank's label."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, start = 10_007, 5
    logits = (torch.randn(7, vocabulary, generator=generator) * 10).to(device, torch.bfloat16)
    labels = torch.tensor([IGNORE, 0, start, 77, 4100, vocabulary + start - 1, vocabulary + start], device=device)
    sums = LocalSums.make(labels, logits)
    kernel.read(logits, labels, start, sums.of(slice(None)))
    log_sum = sums.maxima + sums.sums.log()
    scaled = torch.empty_like(logits, dtype=torch.float32)
    kernel.differentiate(logits, labels, start, log_sum, (labels != IGNORE) * 0.5, scaled, softmax_scale(log_sum, 1e-2))
    kernel.differentiate(logits, labels, start, log_sum, (labels != IGNORE) * 0.5, logits)
    return [sums.maxima, sums.sums, sums.targets, scaled, logits]


LOSS = Fused("the loss's softmax", TorchLoss(), _load_triton, _compute_example, is_exact=False)


def find_places(labels: Tensor, start: int, vocabulary_local: int) -> tuple[Tensor, Tensor]:
    """The index of each label in this rank's part of the vocabulary, 0 if it is in another's; and whether it is in this part."""
    is_mine = (labels >= start) & (labels < start + vocabulary_local)
    return (labels - start).where(is_mine, 0), is_mine
