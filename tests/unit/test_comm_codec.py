"""Codecs of messages: numbers within their bounds, one message with its scales, whatever the dtype, the length, the values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from framework.comm.codec import BlockCodec
from tests.codec_bound import error_bound

CODECS = [
    BlockCodec("fp8", 16),
    BlockCodec("int8", 16),
    BlockCodec("int4", 16),
    BlockCodec("int4", 16, is_rotated=True),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind + "-rotated" * codec.is_rotated)


def sent(codec: BlockCodec, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x as it arrives."""
    out = torch.full(x.shape, 9.0, dtype=dtype or x.dtype)
    codec.decode(codec.encode(x), out)
    return out


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@codecs
@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 48, 95])
def test_numbers_of_any_dtype_and_length_arrive_within_the_bound_of_their_block(codec: BlockCodec, numel: int) -> None:
    for dtype in DTYPES:
        x = draw(numel, dtype=dtype)
        x[0] *= 40  # an outlier costs its own block only
        wide = torch.promote_types(dtype, torch.float32)
        bound = error_bound(codec, x.to(wide))
        assert ((sent(codec, x, wide) - x).abs() <= bound).all()
        # In their own dtype, with its rounding: DeepSpeed read bf16 as fp16 (DeepSpeed#7606, #7775), values were off by 2^100.
        rounding = torch.finfo(dtype).eps * x.abs().max()
        assert ((sent(codec, x).to(wide) - x.to(wide)).abs() <= bound + rounding).all()
        # And near their bound: half a step of 127 levels is not half a step of 7.
        assert bound.max() <= x.abs().max().to(wide) * {"fp8": 1 / 8, "int8": 1 / 250, "int4": 1 / 3}[codec.kind]


@codecs
def test_bf16_is_not_read_as_fp16(codec: BlockCodec) -> None:
    x = torch.tensor([1e38, -3e-30, 70000.0, 1.0], dtype=torch.bfloat16)  # none of the first three is an fp16 number
    for number in x:
        assert torch.isclose(sent(codec, number[None]), number, rtol=1 / 16).all()


@codecs
@pytest.mark.parametrize("numel", [1, 3, 16, 31, 320])
def test_a_message_has_the_bytes_that_were_promised_and_no_others(codec: BlockCodec, numel: int) -> None:
    blocks = -(-numel // 16)
    coded = 16 * blocks if codec.is_rotated else numel
    codes = -(-coded // (2 if codec.kind == "int4" else 1))
    message = codec.encode(draw(numel))
    assert message.dtype == torch.uint8
    assert len(message) == codec.message_bytes(numel) == 4 * blocks + 4 * -(-codes // 4)
    # Where its memory comes from does not show: what pads it is written, too.
    dirty = torch.full_like(message, 0xAB)
    assert torch.equal(codec.encode(draw(numel), dirty), message)


@codecs
def test_rows_are_messages_of_their_own(codec: BlockCodec) -> None:
    x = draw(3, 2, 37)
    rows = torch.stack([torch.stack([codec.encode(row) for row in rows]) for rows in x])
    assert torch.equal(codec.encode(x), rows)
    out = torch.empty_like(x)
    codec.decode(rows, out)
    assert torch.equal(out[2, 1], sent(codec, x[2, 1]))
    # Within a wider message, as parts of several buffers come: rows are strided.
    wider = torch.cat([rows, torch.zeros_like(rows)], dim=-1)
    codec.decode(wider[..., : rows.shape[-1]], out.zero_())
    assert torch.equal(out, torch.stack([sent(codec, each) for each in x]))


@codecs
def test_a_sum_is_that_of_the_numbers_that_arrive(codec: BlockCodec) -> None:
    x = draw(4, 37)
    total = torch.empty(37, dtype=torch.float64)
    codec.decode_sum(codec.encode(x), total)
    torch.testing.assert_close(total, sum(sent(codec, each) for each in x), rtol=1e-14, atol=1e-14)
    narrow = torch.empty(37, dtype=torch.bfloat16)
    codec.decode_sum(codec.encode(x), narrow)
    assert torch.equal(narrow, total.float().bfloat16())


@codecs
def test_a_block_of_zeros_arrives_as_zeros(codec: BlockCodec) -> None:
    for dtype in DTYPES:
        assert torch.equal(sent(codec, torch.zeros(40, dtype=dtype)), torch.zeros(40, dtype=dtype))


@codecs
@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-30, 1e30, 8e37])
def test_huge_and_tiny_numbers_keep_their_bound(codec: BlockCodec, largest: float) -> None:
    x = (draw(50, dtype=torch.float64) / 4).clamp(-1, 1).mul(largest).float()
    off = (sent(codec, x) - x).abs()
    assert off.isfinite().all()
    assert (off <= error_bound(codec, x)).all()


@codecs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39], ids=str)
def test_a_number_that_is_not_finite_is_seen_by_the_receiver(codec: BlockCodec, bad: float) -> None:
    for dtype in DTYPES:
        x = draw(40)
        x[20] = bad  # 1e39 is one in fp64
        x = x.to(dtype)
        arrived = sent(codec, x, torch.float32)
        assert not arrived[16:32].isfinite().all()
        assert arrived[:16].isfinite().all()
        assert arrived[32:].isfinite().all()


def test_fp8_numbers_arrive_without_a_second_rounding() -> None:
    codec = BlockCodec("fp8", 16)
    x = draw(64, dtype=torch.float32)
    exact = sent(codec, x, torch.float64)
    assert torch.equal(sent(codec, x, torch.bfloat16).double(), exact)
    # What has arrived once arrives as it is: its block's largest number may have become smaller, never its fp8 numbers finer.
    assert torch.equal(sent(codec, exact), exact)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_largest_number_of_a_block_is_kept(kind: str) -> None:
    x = draw(160, dtype=torch.float32)
    largest = x.view(10, 16).abs().argmax(1, keepdim=True)
    arrived = sent(BlockCodec(kind, 16), x).view(10, 16)
    torch.testing.assert_close(arrived.gather(1, largest), x.view(10, 16).gather(1, largest), rtol=1e-6, atol=0)


def test_a_rotation_spreads_an_outlier_and_keeps_the_length_of_errors() -> None:
    x = draw(256, dtype=torch.float64) * 0.01
    x[77] = 1.0
    plain, rotated = BlockCodec("int4", 256), BlockCodec("int4", 256, is_rotated=True)
    errors: Callable[[BlockCodec], Tensor] = lambda codec: (sent(codec, x) - x).norm()  # noqa: E731
    # Without it all but the outlier are rounded to nothing.
    assert torch.equal(sent(plain, x)[:77], torch.zeros(77, dtype=torch.float64))
    assert errors(rotated) < errors(plain) / 2
    # The docstring's: scale / 2 in root mean square, of a scale that |x|_2 / 7 bounds.
    assert errors(rotated) <= 16 * x.norm() / 14


def test_blocks_that_cannot_be_packed_or_rotated_are_refused() -> None:
    for make in (
        lambda: BlockCodec("int4", 15),
        lambda: BlockCodec("int8", 16, True),
        lambda: BlockCodec("int4", 128, True),
    ):
        with pytest.raises(AssertionError):
            make()
    with pytest.raises(AssertionError):
        BlockCodec("int8", 16).decode(torch.zeros(20, dtype=torch.uint8), torch.empty(17))
