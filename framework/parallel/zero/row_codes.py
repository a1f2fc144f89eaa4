"""Frozen weights that a rank keeps as codes: NF4 or fp8 in blocks of the global tensor's rows, with a scale for each block.

    number    table[code] * scale, in fp32, rounded once to the dtype that forward reads
    scale     fp32, the largest absolute value of 64 numbers side by side in a row (last dim); a row's last block may be shorter
    nf4       4 bits: the quantiles of a normal distribution of QLoRA (Dettmers et al. 2023, appendix E), the nearest one
    fp8       8 bits: e4m3 of number / scale * 448

    message   [ table, fp32 | scales of the blocks that the rank's elements are in, fp32 | codes | padding to 4 bytes ]   uint8

Blocks are those of the global tensor, so every layout has the same numbers to the last bit, and of a weight whose rows are
multiples of 64 they are those of bitsandbytes. A rank that holds a part of a block reads all of it once, for its scale, and keeps
that beside the codes of its own elements: ranks of `tp` cut rows, those of ZeRO cut the flat buffer, anywhere.

    R local rows of width w, of S scales each
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.fused import Fused
from framework.comm.transfer import fetch, upload
from framework.mesh.layout import Box, Layout, interval_to_boxes

RowKind = Literal["nf4", "fp8"]
BLOCK = 64
BITS = {"nf4": 4, "fp8": 8}
_SCALE_BYTES = 4
# Kinds by the names that layouts have for them.
ROW_CODES: dict[str, RowKind] = {"nf4 rows": "nf4", "fp8 rows": "fp8"}
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def table_of(kind: RowKind) -> Tensor:
    """The numbers of all codes, [2^bits] fp32, in [-1, 1]; fp8 has two NaN among them."""
    if kind == "nf4":
        return torch.tensor(NF4, dtype=torch.float32)
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 448


def bytes_per_number(kind: RowKind) -> float:
    """Bytes of a number and its share of a scale."""
    return BITS[kind] / 8 + _SCALE_BYTES / BLOCK


def find_codes(kind: RowKind, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and codes of rows that begin with a block.  x: [..., w] -> [..., blocks] fp32, [..., w] uint8."""
    w = x.shape[-1]
    blocks = F.pad(x.float(), (0, -w % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    # Any scale serves for a block of zeros.
    ratios = blocks / torch.where(scales == 0, 1, scales).unsqueeze(-1)
    if kind == "fp8":
        codes = (ratios * 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        table = upload(table_of(kind), x.device)
        codes = torch.bucketize(ratios, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return scales, codes.flatten(-2)[..., :w]


def round_rows(kind: RowKind, x: Tensor) -> Tensor:
    """The numbers of a weight's codes, in x's dtype.  x: [..., w], whole rows of any floating dtype."""
    scales, codes = find_codes(kind, x)
    numbers = upload(table_of(kind), x.device)[codes.long()]
    return (numbers * scales.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]).to(x.dtype)


def widen(box: Box, shape: tuple[int, ...]) -> Box:
    """The box of the whole blocks that a box has elements of, in a tensor of this global shape."""
    first, last = box.offsets[-1], box.offsets[-1] + box.sizes[-1]
    start, stop = first - first % BLOCK, min(last + -last % BLOCK, shape[-1])
    return Box((*box.offsets[:-1], start), (*box.sizes[:-1], stop - start))


class TorchRows:
    """Numbers of codes by torch's operations. chunk: how many at a time, for what that takes beside them, 20 bytes each, is
    counted in no plan."""

    chunk = 2**21

    def decode(self, table: Tensor, codes: Tensor, here: int, scales: Tensor, columns: Tensor, out: Tensor) -> None:
        """Write the numbers of codes from place `here` on.

        table: [16] for nf4, whose places are of half a byte, or [256]; scales: [R, S], of each row; columns: [w], the number of
        each column's scale, of which the first column has the first; out: [R, w], floating.
        """
        if len(table) == len(NF4):
            # Both numbers of a byte at once.
            pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], 1)
            words = codes[here // 2 : (here + out.numel() + 1) // 2]
            numbers = pairs.index_select(0, words.int()).view(-1)[here % 2 : here % 2 + out.numel()]
        else:
            numbers = table.index_select(0, codes[here : here + out.numel()].int())
        out.copy_(numbers.view(out.shape) * scales.index_select(1, columns - columns[0]))


def _load_triton() -> Any:
    from framework.comm.triton_codec import TritonRows

    return TritonRows()


def _compute_example(kernel: TorchRows, device: torch.device) -> list[Tensor]:
    """Rows of blocks that are cut short in front and behind, from an odd place on, in fp32 and bf16."""
    generator, found = torch.Generator().manual_seed(0), []
    codes = torch.randint(0, 127, (4_096,), dtype=torch.uint8, generator=generator).to(device)
    scales = torch.rand(7, 4, generator=generator).to(device)
    columns = (torch.arange(200, device=device) + 30) // BLOCK + 5
    for kind in get_args(RowKind):
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(7, 200, dtype=dtype, device=device)
            kernel.decode(table_of(kind).to(device), codes, 3, scales, columns, out)
            found.append(out)
    return found


ROWS = Fused("frozen weights in few bits", TorchRows(), _load_triton, _compute_example, is_exact=True)


@dataclass(frozen=True)
class CodedRows:
    """The local rows of one parameter in a buffer: elements from `start` on, scales from `first` on."""

    layout: Layout
    start: int
    first: int

    @cached_property
    def width(self) -> int:
        return self.layout.shape_local[-1]

    @cached_property
    def height(self) -> int:
        return self.layout.numel_local // max(self.width, 1)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The columns of a local row at which another scale begins: at whole blocks of the global row, and where its runs do."""
        found, here = [], 0
        for low, high in self.layout.runs[-1]:
            columns = range(low + BLOCK - low % BLOCK, high, BLOCK)
            found += [here, *(here + column - low for column in columns)] if low < high else []
            here += high - low
        return tuple(found)

    @property
    def stop(self) -> int:
        return self.start + self.layout.numel_local

    def scale_at(self, position: int) -> int:
        """The number, in the buffer, of the scale of an element of these rows."""
        row, column = divmod(position - self.start, self.width)
        return self.first + row * len(self.cuts) + bisect_right(self.cuts, column) - 1

    @cached_property
    def scale_of_column(self) -> Tensor:
        """The number of each column's scale within its row, [w] int64 on the CPU."""
        return torch.bucketize(torch.arange(self.width), torch.tensor(self.cuts, dtype=torch.int64), right=True) - 1


@dataclass(frozen=True)
class RowCodec:
    """The codes of a buffer of frozen weights. layouts: of its parameters, side by side; numel: elements that each rank owns,
    an even number."""

    kind: RowKind
    layouts: tuple[Layout, ...]
    numel: int

    @cached_property
    def rows(self) -> tuple[CodedRows, ...]:
        starts = accumulate((each.numel_local for each in self.layouts), initial=0)
        found: list[CodedRows] = []
        for layout, start in zip(self.layouts, starts, strict=False):
            last = found[-1] if found else None
            found.append(CodedRows(layout, start, last.first + last.height * len(last.cuts) if last else 0))
        return tuple(found)

    @cached_property
    def num_scales(self) -> int:
        """Scales of a message: as many as the rank has whose elements are in the most blocks."""
        stop = self.rows[-1].stop
        windows = ((low, min(low + self.numel, stop)) for low in range(0, stop, self.numel))
        return max((self._scale_at(high - 1) - self._scale_at(low) + 1 for low, high in windows), default=0)

    def message_bytes(self, numel: int) -> int:
        """Bytes of a rank's message."""
        assert numel == self.numel, (numel, self.numel)
        codes = -(-numel * BITS[self.kind] // (8 * _SCALE_BYTES))
        return _SCALE_BYTES * (2 ** BITS[self.kind] + self.num_scales + codes)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the numbers of all owners' messages.  messages: [owners, bytes] uint8; out: [owners, numel], floating."""
        columns = [upload(rows.scale_of_column, out.device) for rows in self.rows]
        for owner, message in enumerate(messages):
            self._decode(message, owner * self.numel, out[owner], columns)

    def decode_own(self, message: Tensor, start: int) -> Tensor:
        """The numbers of one message, [numel] fp32. start: its first element's place in the buffer."""
        out = torch.zeros(self.numel, device=message.device)
        self._decode(message, start, out, [upload(rows.scale_of_column, out.device) for rows in self.rows])
        return out

    def write(self, message: Tensor, start: int, first: int, box: Box, layout: Layout, values: Tensor) -> None:
        """Write the codes of a box of one parameter, which is in no message yet. start: the place of the message's first element
        in the buffer; first: that of the box's first one; values: of `widen(box)`, any floating dtype and device."""
        table, scales, codes = self._split(message)
        rows = next(each for each in self.rows if each.start <= first < each.stop)
        wide = widen(box, layout.shape)
        found, written = find_codes(self.kind, fetch(values, message.device))
        skipped = box.offsets[-1] - wide.offsets[-1]
        table.copy_(table_of(self.kind))
        written = written[..., skipped : skipped + box.sizes[-1]].flatten()
        # The first element of each block in each row of the box.
        blocks = torch.arange(found.shape[-1], device=message.device) * BLOCK - skipped
        of_rows = torch.arange(box.numel // box.sizes[-1], device=message.device) * box.sizes[-1]
        places = (of_rows[:, None] + blocks.clamp_(min=0)).flatten() + (first - rows.start)
        within = upload(rows.scale_of_column, message.device)[places % rows.width]
        numbers = rows.first + places // rows.width * len(rows.cuts) + within
        scales[numbers - self._scale_at(start)] = found.flatten()
        here = first - start
        if self.kind == "fp8":
            codes[here : here + len(written)] = written
            return
        pairs = F.pad(written, (here % 2, (here + len(written)) % 2)).view(-1, 2)
        codes[here // 2 : here // 2 + len(pairs)] |= pairs[:, 0] | pairs[:, 1] << 4

    def _decode(self, message: Tensor, start: int, out: Tensor, columns: list[Tensor]) -> None:
        table, scales, codes = self._split(message)
        kernel = ROWS.on(out.device)
        for rows, of_column in zip(self.rows, columns, strict=True):
            for first, box in self._pieces(rows, start, kernel.chunk):
                (height, width), column = box.sizes, box.offsets[1]
                here = first - start
                low = rows.scale_at(first)
                count = rows.scale_at(first + width - 1) - low + 1
                low -= self._scale_at(start)
                of_rows = scales[low : low + height * count].view(height, count)
                places = of_column[column : column + width]
                kernel.decode(table, codes, here, of_rows, places, out[here : here + box.numel].view(height, width))

    def _pieces(self, rows: CodedRows, start: int, chunk: int) -> Iterator[tuple[int, Box]]:
        """Parts of some rows that a message has, of one row or of several whole ones of about `chunk` numbers: the place of each,
        and its box."""
        low, high = (min(max(each, rows.start), rows.stop) - rows.start for each in (start, start + self.numel))
        for box in interval_to_boxes((rows.height, rows.width), low, high):
            step = max(1, chunk // rows.width)
            for row in range(box.offsets[0], box.offsets[0] + box.sizes[0], step):
                count = min(step, box.offsets[0] + box.sizes[0] - row)
                place = rows.start + row * rows.width + box.offsets[1]
                yield place, Box((row, box.offsets[1]), (count, box.sizes[1]))

    def _scale_at(self, position: int) -> int:
        return next(each for each in reversed(self.rows) if each.start <= position).scale_at(position)

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The table, the scales and the codes of a message: views."""
        numbers = 2 ** BITS[self.kind]
        end = _SCALE_BYTES * (numbers + self.num_scales)
        fp32 = message[:end].view(torch.float32)
        return fp32[:numbers], fp32[numbers:], message[end:]
