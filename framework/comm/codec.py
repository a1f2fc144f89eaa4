"""Messages of coded numbers, and sums over ranks whose terms travel so: rounded to a narrower dtype, or in blocks of few bits.

A codec writes numbers in one byte or half a byte each, with a scale for every block of them in the same message.

    message of n numbers   [ scales: fp32, one a block | codes, 8 or 4 bits a number | padding to 4 bytes ]     uint8
    number                 code * scale of its block

    kind | code           | scale of a block with the largest absolute value a   | error of a number x, at most
    fp8  | e4m3           | the power of two at or above a / 448                 | |x| / 16, or scale / 1024 if that is more
    int8 | -127 ... 127   | a / 127                                              | scale / 2
    int4 | -7 ... 7       | a / 7                                                | scale / 2

No scale is below 2^-126, fp32's smallest normal number. What arrives is rounded once more to the receiver's dtype, which fp8
numbers within that dtype's range are spared: their scales are powers of two. A block with an infinity, a NaN or a number beyond
fp32's range never arrives finite: its scale is NaN, so a check for finite numbers finds it behind the message as before it.

int4 may be rotated: a block is multiplied by the orthonormal Hadamard matrix H first, and what arrives by H, its own inverse. One
outlier is then spread over its block instead of setting the scale for it: a block of B with one number a not near zero has its
largest value fall from a to a / sqrt(B). With d the codes' rounding, |d_i| <= scale / 2, numbers err by H d: at most
sqrt(B) scale / 2 each, and scale / 2 in root mean square over the block, where scale <= |x|_2 / 7 always.

A backend would add in what travels; here ranks exchange messages and add what arrives in the dtype of the result.

    x    [outer, inner, part]      an axis in two levels, k nodes with m ranks on each; in one level k = 1 and m = n
    1    rank (o, i) codes x and sends column i' to its neighbour (o, i'): its parts for rank i' of all nodes
    2    it adds up what has come, [k, part]: the sums of its node, side by side in the order in which they leave
    3    it codes those and sends row o' to rank (o', i), and adds up what has come, [part]

Each rank sends (n-1)/n of x, coded, and k-1 parts of it to other nodes. A number is coded once on its way over one level and
twice over two, and launches are as many for any number of ranks. An all-reduce gathers the sums, coded once more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from framework.comm.algorithms import Pending, choose, exchange_parts, in_turn, then
from framework.comm.communicator import Communicator
from framework.comm.fused import FP8_CAPABILITY, Fused

CodecKind = Literal["fp8", "int8", "int4"]

_BITS = {"fp8": 8, "int8": 8, "int4": 4}
_LARGEST = {"fp8": 448, "int8": 127, "int4": 7}  # what a block's largest absolute value becomes, at most
_SCALE_BYTES = 4
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000  # bits of an fp32 number


class Wire(Protocol):
    """The form in which numbers travel, messages of bytes. All messages of a tensor are coded by the same few launches."""

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of so many numbers."""

    def encode(self, x: Tensor, out: Tensor) -> Tensor:
        """Write each message and return all.  x: [..., n], any strides but the last; out: [..., message_bytes(n)] uint8."""

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the numbers of messages.  message: [..., message_bytes(n)] uint8; out: [..., n]."""

    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of messages' numbers, in out's dtype.  messages: [ranks, ..., message_bytes(n)] uint8; out: [..., n]."""


@dataclass(frozen=True)
class Rounding:
    """The wire of numbers rounded to a narrower dtype."""

    dtype: torch.dtype

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of so many numbers."""
        return numel * self.dtype.itemsize

    def encode(self, x: Tensor, out: Tensor) -> Tensor:
        """Round to the message, of the same shape as bytes."""
        out.view(self.dtype).copy_(x)
        return out

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Widen the message."""
        out.copy_(message.view(self.dtype))

    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Add up in the order of ranks."""
        torch.sum(messages.view(self.dtype), 0, dtype=out.dtype, out=out)


class _Run(NamedTuple):
    """Numbers [start, stop) of a message, in blocks of `size`: the first is block `block`."""

    start: int
    stop: int
    size: int
    block: int


@dataclass(frozen=True)
class BlockCodec:
    """A codec by kind, with blocks of `block` numbers; the last block of a message may be shorter.

    Messages and numbers may have leading dims: each row is a message. All rows are coded by the same few launches.
    """

    kind: CodecKind
    block: int = 256
    is_rotated: bool = False

    def __post_init__(self) -> None:
        # Codes of whole blocks end at a byte, kernels take powers of two, and a block of 4^k numbers is rotated as a square.
        assert self.block > 1 and self.block & (self.block - 1) == 0, f"a block of {self.block}"  # noqa: PT018
        assert not self.is_rotated or (self.kind == "int4" and 4 ** (self.block.bit_length() // 2) == self.block), self

    @property
    def largest(self) -> float:
        """The absolute value that a block's largest becomes, at most."""
        return float(_LARGEST[self.kind])

    @property
    def bytes_per_number(self) -> float:
        """Bytes of a number in a long message."""
        return _BITS[self.kind] / 8 + _SCALE_BYTES / self.block

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of `numel` numbers, a multiple of 4: (bits / 8 + 4 / block) each, and the rounding up."""
        blocks = -(-numel // self.block)
        codes = blocks * self.block if self.is_rotated else numel
        return _SCALE_BYTES * (blocks + -(-codes * _BITS[self.kind] // (8 * _SCALE_BYTES)))

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The message of x, in `out` if that is given.  x: [..., n], any floating dtype -> [..., message_bytes(n)] uint8."""
        n = x.shape[-1]
        message = x.new_empty(*x.shape[:-1], self.message_bytes(n), dtype=torch.uint8) if out is None else out
        _, codes = self.split(message, n)
        numbers = self._rotate(F.pad(x, (0, -n % self.block))) if self.is_rotated else x
        # Equal numbers make equal messages, whatever memory held: what pads them is zero.
        codes[..., -(-numbers.shape[-1] * _BITS[self.kind] // 8) :] = 0
        _form_for(self.kind, numbers).encode(self, numbers, message)
        return message

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the numbers of a message.  message: [..., message_bytes(n)] uint8; out: [..., n], any floating dtype."""
        if not self.is_rotated:
            _form_for(self.kind, out).decode_sum(self, message.unsqueeze(0), out)
            return
        n = out.shape[-1]
        numbers = torch.empty(*out.shape[:-1], n + -n % self.block, device=out.device)
        _form_for(self.kind, numbers).decode_sum(self, message.unsqueeze(0), numbers)
        out.copy_(self._rotate(numbers)[..., :n])

    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of several messages' numbers, in fp32 or out's dtype if that is wider.

        messages: [ranks, ..., message_bytes(n)] uint8; out: [..., n], any floating dtype.
        """
        if not self.is_rotated:
            _form_for(self.kind, out).decode_sum(self, messages, out)
            return
        terms = out.new_empty(len(messages), *out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
        self.decode(messages, terms)
        out.copy_(terms.sum(0))

    def split(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Scales, [..., blocks] fp32, and codes, [..., bytes] uint8, of messages of `numel` numbers: views."""
        assert message.shape[-1] == self.message_bytes(numel), (tuple(message.shape), numel, self)
        scale_bytes = _SCALE_BYTES * -(-numel // self.block)
        return message[..., :scale_bytes].view(torch.float32), message[..., scale_bytes:]

    def runs(self, numel: int) -> Iterator[_Run]:
        """The whole blocks, and the shorter one behind them: without a copy that pads."""
        whole = numel // self.block
        if whole:
            yield _Run(0, whole * self.block, self.block, 0)
        if numel % self.block:
            yield _Run(whole * self.block, numel, numel % self.block, whole)

    def scale(self, blocks: Tensor) -> Tensor:
        """Scales of blocks.  blocks: [..., size] -> [...] fp32; NaN where a number is not finite."""
        largest = torch.empty(blocks.shape[:-1], dtype=torch.float32, device=blocks.device)
        # Copied: within `verify` a cast of fp64 numbers to fp32 leaves them as they are.
        largest.copy_(blocks.abs().amax(-1))
        scale = (largest / self.largest).clamp_(min=_SMALLEST_SCALE)
        if self.kind == "fp8":
            # Up to the next power of two: adding all bits of the mantissa carries into the exponent.
            scale = ((scale.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)
        return scale + (largest - largest)  # 0, or NaN for NaN and infinity

    def _rotate(self, x: Tensor) -> Tensor:
        """Each block times the Hadamard matrix H of its size.  x: [..., n], n a multiple of the block -> [..., n]."""
        # H of size s s is the Kronecker product of two of size s: 4 sqrt(B) operations a number instead of 2 B.
        side = isqrt(self.block)
        x = _widen(x)
        h = _hadamard(side, x)
        return (h @ x.unflatten(-1, (-1, side, side)) @ h).flatten(-3)


# Codecs of parameters and of gradients, by the names that layouts have for them.
CODECS = {"fp8 blocks": BlockCodec("fp8"), "int8 blocks": BlockCodec("int8")}
REDUCE_CODECS = {
    "int8": BlockCodec("int8"),
    "int4": BlockCodec("int4"),
    "int4_rotated": BlockCodec("int4", is_rotated=True),
}


class TorchCodes:
    """A codec's passes over its numbers, before they are turned and behind it, by torch's operations."""

    def encode(self, codec: BlockCodec, x: Tensor, message: Tensor) -> None:
        """Write scales and codes.  x: [..., n]; message: [..., message_bytes(n)] uint8."""
        scales, codes = codec.split(message, x.shape[-1])
        # A narrower dtype is widened at once: an operation of two dtypes is many times slower on CPUs.
        numbers = _widen(x)
        packed = torch.empty_like(numbers, dtype=torch.int8) if codec.kind == "int4" else codes
        for run in codec.runs(x.shape[-1]):
            blocks = _blocks_of(numbers, run)
            scale = codec.scale(blocks)
            _scales_of(scales, run).copy_(scale)
            scaled = blocks * scale.reciprocal().unsqueeze(-1)
            if codec.kind == "fp8":
                _blocks_of(packed.view(torch.float8_e4m3fn), run).copy_(scaled)
            else:
                _blocks_of(packed.view(torch.int8), run).copy_(scaled.round_())
        if codec.kind == "int4":
            _pack(packed, codes)

    def decode_sum(self, codec: BlockCodec, messages: Tensor, out: Tensor) -> None:
        """Write the sum of codes times scales.  messages: [ranks, ..., message_bytes(n)] uint8; out: [..., n]."""
        if len(messages) == 1:
            self._decode(codec, messages[0], out)
            return
        dtype = torch.promote_types(out.dtype, torch.float32)
        terms = out.new_empty(len(messages), *out.shape, dtype=dtype)
        self._decode(codec, messages, terms)
        out.copy_(terms.sum(0))

    def _decode(self, codec: BlockCodec, message: Tensor, out: Tensor) -> None:
        scales, codes = codec.split(message, out.shape[-1])
        numbers = _unpack(codec.kind, codes, out.shape[-1])
        for run in codec.runs(out.shape[-1]):
            scale = _scales_of(scales, run).unsqueeze(-1)
            if out.dtype == torch.float32:
                torch.mul(_blocks_of(numbers, run), scale, out=_blocks_of(out, run))
            else:
                _blocks_of(out, run).copy_(_blocks_of(numbers, run).mul_(scale))


def _load_triton() -> Any:
    # Triton comes with torch for CUDA only.
    from framework.comm.triton_codec import TritonCodes

    return TritonCodes()


def _compute_example(kinds: Sequence[CodecKind], form: TorchCodes, device: torch.device) -> list[Tensor]:
    """Messages and sums of each kind, of two ranks: of more, terms may be added in another order."""
    x = torch.arange(-222, 222, device=device, dtype=torch.float32).sin_().view(2, 2, 111)
    found = []
    for kind in kinds:
        codec = BlockCodec(kind, 32)
        message = torch.zeros(2, 2, codec.message_bytes(111), dtype=torch.uint8, device=device)
        form.encode(codec, x, message)
        total = torch.empty(2, 111, device=device)
        form.decode_sum(codec, message, total)
        found += [message, total]
    return found


CODES = Fused(
    "codes of messages", TorchCodes(), _load_triton, partial(_compute_example, ("int8", "int4")), is_exact=True
)
FP8_CODES = Fused(
    "fp8 codes of messages", TorchCodes(), _load_triton, partial(_compute_example, ("fp8",)), True, FP8_CAPABILITY
)


def _form_for(kind: CodecKind, numbers: Tensor) -> TorchCodes:
    """The form that codes such numbers, [..., n]: kernels take at most 3 dims, and nothing wider than fp32."""
    is_taken = numbers.dtype != torch.float64 and numbers.ndim <= 3 and numbers.numel() > 0
    codes = FP8_CODES if kind == "fp8" else CODES
    return codes.on(numbers.device) if is_taken else codes.plain


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _pack(codes: Tensor, out: Tensor) -> None:
    """Two codes in a byte.  codes: [..., n] int8; out: [..., n / 2 and the padding] uint8."""
    pairs = F.pad(codes, (0, 2 * out.shape[-1] - codes.shape[-1])).unflatten(-1, (-1, 2))
    out.copy_(((pairs[..., 1] << 4) | (pairs[..., 0] & 0xF)).view(torch.uint8))


def _unpack(kind: CodecKind, codes: Tensor, numel: int) -> Tensor:
    """Codes as fp32 numbers, in memory of their own.  codes: [..., bytes] uint8 -> [..., numel]."""
    if kind == "fp8":
        return codes[..., :numel].view(torch.float8_e4m3fn).float()
    signed = codes.view(torch.int8)
    if kind == "int8":
        return signed[..., :numel].float()
    # Shifts of signed numbers keep the sign.
    numbers = torch.empty(*codes.shape, 2, device=codes.device)
    numbers[..., 0] = (signed << 4) >> 4
    numbers[..., 1] = signed >> 4
    return numbers.flatten(-2)[..., :numel]


def _blocks_of(x: Tensor, run: _Run) -> Tensor:
    """The numbers of a run, a view.  x: [..., n] -> [..., blocks, size]."""
    return x[..., run.start : run.stop].unflatten(-1, (-1, run.size))


def _scales_of(scales: Tensor, run: _Run) -> Tensor:
    """The scales of a run, a view.  scales: [..., all blocks] -> [..., blocks]."""
    return scales[..., run.block : run.block + (run.stop - run.start) // run.size]


def _hadamard(size: int, like: Tensor) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two, symmetric: [size, size], in the dtype of `like` and on its device."""
    h = like.new_full((1, 1), size**-0.5)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def scatter_coded(out: Tensor, x: Tensor, axis: Communicator, wire: Wire) -> Pending:
    """Reduce-scatter of what arrives of all ranks' x, added in out's dtype.  out: any shape; x: n times as large, its dtype."""
    inner, outer = axis.levels or (axis, None)
    parts = x.view(-1, inner.size, out.numel())
    first = _CodedParts(parts.transpose(0, 1), inner, wire)
    if outer is None:
        return Pending(first.works, [x], lambda: first.end(out.view(1, -1)))

    def cross() -> Pending:
        sums = torch.empty_like(parts[:, 0])
        first.end(sums)
        second = _CodedParts(sums.unsqueeze(1), outer, wire)
        return Pending(second.works, [], lambda: second.end(out.view(1, -1)))

    return in_turn(axis, Pending(first.works, [x]), cross)


def sum_coded(x: Tensor, axis: Communicator, wire: Wire) -> Pending:
    """All-reduce of what arrives of all ranks' x, in place: a `scatter_coded`, after which all gather the sums, coded too.

    x: any shape and floating dtype. What follows the first hop starts in the wait.
    """
    part = -(-x.numel() // axis.size)
    # Nobody adds the padding up, but it is sent: reused memory would send what an earlier operation has left.
    terms = F.pad(x.view(-1), (0, axis.size * part - x.numel()))
    sums = x.new_empty(part)

    def gather() -> Pending:
        messages = x.new_empty(axis.size, wire.message_bytes(part), dtype=torch.uint8)
        # Through the messages, this rank's own sum too: else it alone would keep the exact bits of its part, and replicas would
        # drift apart.
        mine = wire.encode(sums, messages[axis.rank])
        return then(choose("all_gather", messages, axis)(messages, mine, axis), lambda: take_over(messages))

    def take_over(messages: Tensor) -> None:
        wire.decode(messages, terms.view(axis.size, -1))
        x.view(-1).copy_(terms[: x.numel()])

    return then(scatter_coded(sums, terms, axis, wire), gather)


class _CodedParts:
    """Messages of every rank for every rank, on their way.  rows: this rank's numbers for each, [ranks, places, n]."""

    def __init__(self, rows: Tensor, axis: Communicator, wire: Wire):
        self._wire = wire
        sent, self._received = rows.new_empty(2, *rows.shape[:2], wire.message_bytes(rows.shape[2]), dtype=torch.uint8)
        wire.encode(rows, sent)
        self.works: list[Any]
        if rows.is_cuda:
            # One launch for all parts.
            self.works = [dist.all_to_all_single(self._received, sent, group=axis.scatter_group, async_op=True)]
        else:
            self._received[axis.rank] = sent[axis.rank]
            of_peers = [part for rank, part in enumerate(self._received) if rank != axis.rank]
            self.works = exchange_parts(of_peers, sent, axis)

    def end(self, out: Tensor) -> None:
        """Write the sum of what has come to out, [places, n]."""
        self._wire.decode_sum(self._received, out)
