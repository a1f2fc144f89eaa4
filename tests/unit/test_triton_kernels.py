"""Kernels in Triton beside the torch operations that they stand for, interpreted on CPUs; and who is told that they differ."""

from tests.torchao_folder import FOLDER as TORCHAO  # isort: skip  first: what follows imports torchao from there

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from framework.comm import codec, fused
from framework.comm.codec import CODES, FP8_CODES, BlockCodec
from framework.comm.fused import Fused
from framework.errors import ModelError
from framework.mesh.layout import Box, Layout, Shard
from framework.mesh.topology import Topology
from framework.model.chunked_loss import ChunkedLoss, LogitMap
from framework.model.fp8 import CASTS, E4M3, E5M2, Fp8Matmul, TorchCast, quantize
from framework.model.loss import IGNORE, LOSS, TokenLoss, TorchLoss, token_loss
from framework.optim.bit_kernels import BITS, TorchBits
from framework.optim.low_bit import WORD_BITS
from framework.optim.optimizers import FlatOptimizer, state_names
from framework.optim.states import MomentsDtype
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.parallel.zero.row_codes import ROWS
from framework.plan.plan import unconnected
from framework.recipe.schema import Optim
from tests.grid import IN_TURN
from tests.interpreted_triton import DEVICE, FOLDER, fused_kernels, interpreted_triton

pytestmark = IN_TURN

ONE_RANK = unconnected(Topology(), 0)["tp"]
ALL = [LOSS, CASTS, BITS, CODES, FP8_CODES, ROWS]
EACH = pytest.mark.parametrize("kernels", ALL, ids=lambda each: each.name)


@pytest.fixture(scope="module", autouse=True)
def triton() -> Iterator[None]:
    with interpreted_triton():
        yield


# --- the choice


@EACH
def test_kernels_agree_with_torch(kernels: Fused[Any]) -> None:
    assert kernels.find_fault(kernels.load(), DEVICE) is None


class WithoutMaximum(TorchLoss):
    """Does not subtract the largest logit."""

    def read(self, logits: Tensor, labels: Tensor, start: int, sums: tuple[Tensor, Tensor, Tensor]) -> None:
        super().read(logits, labels, start, sums)
        sums[0].zero_()


class Unsaturated(TorchCast):
    """Has a scale for the next smaller number."""

    def cast(self, x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().cast(x, largest / 2, dtype)


class OneBit(TorchBits):
    """Draws words that are off by one bit."""

    def draw(self, key: Any, boxes: Any, shape: Any, out: Tensor) -> None:
        super().draw(key, boxes, shape, out)
        out[-1] ^= 1


@pytest.mark.parametrize(
    ("kernels", "wrong"),
    [(LOSS, WithoutMaximum()), (CASTS, Unsaturated()), (BITS, OneBit())],
    ids=lambda each: str(each)[:9],
)
def test_a_wrong_kernel_is_an_error(kernels: Fused[Any], wrong: Any) -> None:
    planted = Fused(kernels.name, kernels.plain, lambda: wrong, kernels.compute, kernels.is_exact)
    with pytest.raises(
        ModelError, match=f"{kernels.name} on {DEVICE}: the kernel in Triton is off by .*another version"
    ):
        fused._choose(planted, DEVICE)
    assert (
        fused._choose(Fused("right", kernels.plain, kernels.load, kernels.compute, kernels.is_exact), DEVICE)
        is not None
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_kernels_with_fp8_are_torchs_where_triton_has_none(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fused, "_choose", lambda kernels, device: "Triton's")
    numbers: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, ndim=1, numel=lambda: 1)
    fp8 = [CASTS.on(numbers.device), codec._form_for("fp8", numbers)]
    assert fp8 == (["Triton's"] * 2 if capability >= (8, 9) else [CASTS.plain, FP8_CODES.plain])
    assert codec._form_for("int8", numbers) == "Triton's"


def test_without_triton_torch_computes_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    kernels = Fused("a test's kernels", "torch's", lambda: "Triton's", lambda form, device: [], True)
    with caplog.at_level(logging.WARNING):
        assert {fused._choose(kernels, DEVICE) for _ in range(2)} == {"torch's"}
    assert [each.message for each in caplog.records] == [
        f"a test's kernels on {DEVICE}: Triton is not installed, so torch's operations run, in several passes: pip install triton"
    ]
    assert kernels.on(torch.device("cpu")) == "torch's"


# --- the loss


def draw_logits(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(1, rows, vocabulary, generator=generator) * 4).to(DEVICE, dtype)
    labels = torch.randint(vocabulary, (1, rows), generator=generator).to(DEVICE)
    labels[:, ::3] = IGNORE
    return logits, labels


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("vocabulary", [97, 4096, 9001])
def test_loss_and_gradient_are_torchs(dtype: torch.dtype, rtol: float, vocabulary: int) -> None:
    logits, labels = draw_logits(5, vocabulary, dtype)
    stock, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = token_loss(stock, labels, torch.tensor(11, device=DEVICE))
    with fused_kernels():
        # Not a leaf: the gradient is written where the logits were.
        found = TokenLoss(ONE_RANK, vocabulary)(ours * 1, labels, torch.tensor(11, device=DEVICE))
        found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert stock.grad is not None
    torch.testing.assert_close(ours.grad, stock.grad, rtol=rtol, atol=1e-7)


def test_logits_of_minus_infinity_have_no_probability_and_nan_is_no_number() -> None:
    """A block of the vocabulary that a family masks comes before all others."""
    logits, labels = draw_logits(3, 9001, torch.float32)
    logits[..., :5000] = -torch.inf
    labels[:] = 7000
    with fused_kernels():
        loss = TokenLoss(ONE_RANK, 9001)
        expected = token_loss(logits, labels, torch.tensor(3, device=DEVICE))
        torch.testing.assert_close(loss(logits, labels, torch.tensor(3, device=DEVICE)), expected, rtol=1e-5, atol=0)
        logits[0, 1, 8000] = torch.nan
        assert loss(logits, labels, torch.tensor(3, device=DEVICE)).isnan()


def softcap(y: Tensor) -> Tensor:
    return torch.tanh(y / 5) * 5


@pytest.mark.parametrize("operations", [(), (softcap,)], ids=["plain", "softcap"])
def test_a_head_in_chunks_is_torchs_also_behind_a_softcap(operations: tuple[Callable[[Tensor], Tensor], ...]) -> None:
    found = []
    for kernels in (nullcontext(), fused_kernels()):
        torch.manual_seed(5)
        head, x = nn.Linear(16, 101).to(DEVICE), torch.randn(2, 9, 16, device=DEVICE, requires_grad=True)
        labels = torch.randint(101, (2, 9), device=DEVICE)
        with kernels:
            loss_of = ChunkedLoss(head, (), LogitMap(operations, ("",)), ONE_RANK, 101, tokens=7)
            loss_of.expect(labels)
            loss = loss_of(head(x), labels, torch.tensor(18, device=DEVICE))
            loss.backward()
        found.append([loss.detach(), x.grad, head.weight.grad, head.bias.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


# --- fp8


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bf16_number_is_cast_as_torch_casts_it(dtype: torch.dtype, scaling: Any) -> None:
    """In rows of neighbours, and by one number that sets the scale: most below fp8's smallest, or in its middle."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() < 1024)]
    x = numbers.view(-1, 128).to(DEVICE)
    expected = quantize(x, dtype, scaling)
    with fused_kernels():
        found = quantize(x, dtype, scaling)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())


def test_factors_of_zeros_and_what_is_not_finite() -> None:
    for value, is_number in ((0.0, True), (torch.inf, False), (torch.nan, False)):
        x = torch.zeros(3, 16, dtype=torch.bfloat16, device=DEVICE)
        x[1, 5] = value
        with fused_kernels():
            numbers, scale = quantize(x, E5M2, "tensor")
        _, expected = quantize(x, E5M2, "tensor")
        assert torch.equal((numbers.float() / scale).isfinite().all(), torch.tensor(is_number, device=DEVICE))
        assert not is_number or torch.equal(scale, expected)


class Arriving:
    """A main gradient in fp32 that takes gradients at once (`model.matmul.GradView`)."""

    is_deferred = False

    def __init__(self, parameter: nn.Parameter):
        self.parameter, self.view = parameter, torch.ones(parameter.shape, device=DEVICE)

    def add_matmul(self, left: Tensor, right: Tensor, accumulate: Callable[..., None]) -> None:
        accumulate(self.view, left, right, False)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fp8_matmuls_are_torchs_bitwise_and_weights_are_read_once_for_their_scale(scaling: Any) -> None:
    found = []
    for kernels in (nullcontext(), fused_kernels()):
        torch.manual_seed(5)
        linear = nn.Linear(48, 64).to(DEVICE, torch.bfloat16)
        x, dy = (torch.randn(3, 7, size).to(DEVICE, torch.bfloat16) for size in (48, 64))
        matmul, view = Fp8Matmul(linear, False, scaling), Arriving(linear.weight)
        matmul.write_gradient_to(view)
        results = []
        with kernels, CountLargest(linear.weight) as count:
            for _ in range(2):
                results += [matmul.forward(x, linear.bias), matmul.input_gradient(dy), matmul.weight_gradient(x, dy)]
            assert count.of_weight == (1 if scaling == "tensor" else 2)
            # A new value is not seen before it is said that there is one.
            linear.weight.data.mul_(1000)
            matmul.invalidate()
            results += [matmul.forward(x, linear.bias), matmul.input_gradient(dy), matmul.weight_gradient(x, dy)]
            assert count.of_weight == 2 * (1 if scaling == "tensor" else 2)
        # Per turn x twice and dy twice by row; dy once if both of its matmuls take one scale.
        assert count.of_others == 3 * (3 if scaling == "tensor" else 4)
        assert matmul._cast is None
        found.append([each for each in results if each is not None] + [view.view])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class CountLargest:
    """A context that counts how often the largest values of a weight, and of other factors, are looked for."""

    def __init__(self, weight: Tensor):
        self._memory, self.of_weight, self.of_others = weight.data_ptr(), 0, 0

    def __enter__(self) -> "CountLargest":
        kind = type(CASTS.on(DEVICE))
        whole = kind.find_largest

        def find(kernel: Any, x: Tensor, by_row: bool) -> Tensor:
            if x.data_ptr() == self._memory:
                self.of_weight += 1
            else:
                self.of_others += 1
            return whole(kernel, x, by_row)

        self._patch = patch.object(kind, "find_largest", find)
        self._patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)


# --- optimizer states


@pytest.mark.parametrize(
    ("name", "moments", "dtype"),
    [
        ("adamw", "int8", torch.bfloat16),
        ("adamw", "bf16", torch.float32),
        ("lion", "bf16", torch.bfloat16),
        ("sgd", "int8", torch.float32),
    ],
)  # fmt: skip
def test_updates_are_torchs_bitwise(name: str, moments: MomentsDtype, dtype: torch.dtype) -> None:
    """Slices of a stack, a matrix and a vector, several pieces of a chunk; values in bf16 without a master, and with one."""
    layouts = {
        "stack": Layout((6, 10, 12), (Shard("tp", 1, 1, 2),), interval=(17, 300)),
        "matrix": Layout((37, 13), interval=(3, 460)),
        "vector": Layout((19,)),
    }
    numel = sum(each.numel_owned for each in layouts.values())
    found = []
    for kernels in (nullcontext(), fused_kernels()):
        generator = torch.Generator().manual_seed(3)
        value = torch.randn(numel, generator=generator).to(DEVICE, dtype)
        gradient = torch.zeros(numel, device=DEVICE)
        shard = FlatShard(tuple(layouts.values()), value, gradient, tuple(layouts))
        one = torch.ones((), dtype=torch.float64, device=DEVICE)
        with kernels, patch("framework.optim.states.chunk_size", lambda device: 512):
            optim = Optim(name=name, momentum=0.9)  # type: ignore[arg-type]
            optimizer = FlatOptimizer(name, optim, [ShardGroup("all", (shard,), 1.0, 0.1)], DEVICE, moments, seed=5)
            for step in range(3):
                gradient.copy_(torch.randn(numel, generator=generator) * 10.0 ** -(step + 1))
                optimizer.step(1e-2, one, torch.tensor(False, device=DEVICE), step)
            found.append([value, *(optimizer.state(shard, each).float() for each in state_names(optim))])
    for one_, other in zip(*found, strict=True):
        assert torch.equal(one_, other)


def test_words_of_boxes_of_many_dims_and_beyond_32_bits_are_torchs() -> None:
    boxes = [
        (Box((1, 2, 0, 1), (3, 2, 3, 4)), (5, 6, 7, 8)),
        (Box(((1 << WORD_BITS) // 700 - 1, 5), (3, 400)), (1 << 40, 700)),
        (Box((), ()), ()),
    ]
    for box, shape in boxes:
        words = [torch.zeros(box.numel, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        BITS.plain.draw((1, "w"), [box], shape, words[0])
        BITS.load().draw((1, "w"), [box], shape, words[1])
        assert torch.equal(*words)


# --- launches


# Operations that send nothing to a device.
QUIET = {
    "view", "reshape", "slice", "select", "t", "transpose", "expand", "unsqueeze", "squeeze", "detach", "alias", "split",
    "split_with_sizes", "unbind", "permute", "_unsafe_view", "flatten", "as_strided", "empty", "empty_like", "new_empty",
    "empty_strided",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Kernels that a GPU would be sent: torch's operations but for views and new memory, and those in Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        self.count += name not in QUIET
        return func(*args, **(kwargs or {}))

    def count_triton(self) -> Any:
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            # What the interpreter itself asks of torch is not the kernel's.
            count = self.count
            result = run(function, *args, **kwargs)
            self.count = count
            return result

        return patch.object(InterpretedFunction, "run", counted)


def count_launches(work: Callable[[], Any]) -> int:
    launches = Launches()
    with launches.count_triton(), launches:
        work()
    return launches.count


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts calls of the interpreter")
def test_launches_of_a_chunk_of_the_loss_of_a_factor_and_of_an_update() -> None:
    logits, labels = (each[0] for each in draw_logits(4, 97, torch.bfloat16))
    sums = torch.empty(3, 4)
    ones, large, x = torch.ones(4), torch.full((4,), 100.0), torch.randn(8, 16).bfloat16()
    shard = FlatShard((Layout((20, 30)),), torch.zeros(600), torch.ones(600), ("w",))
    found = {}
    for kind, kernels in (("torch", nullcontext()), ("triton", fused_kernels())):
        with kernels:
            loss, cast = LOSS.on(DEVICE), CASTS.on(DEVICE)
            optimizer = FlatOptimizer("adamw", Optim(), [ShardGroup("all", (shard,), 1.0, 0.1)], DEVICE, "int8", seed=5)
            (chunk,) = optimizer.states.chunks
            found[kind] = {
                "statistics": count_launches(lambda loss=loss: loss.read(logits, labels, 0, tuple(sums))),
                "gradient": count_launches(
                    lambda loss=loss: loss.differentiate(logits, labels, 0, large, ones, logits)
                ),
                "factor": count_launches(lambda cast=cast: cast.cast(x, cast.find_largest(x, False), E4M3)),
                "factor, both ways": count_launches(
                    lambda cast=cast: cast.cast_both(x, cast.find_largest(x, False), E4M3)
                ),
                "states, load": count_launches(lambda optimizer=optimizer, chunk=chunk: optimizer.states.load(chunk)),
                "states, store": count_launches(
                    lambda optimizer=optimizer, chunk=chunk: optimizer.states.store(chunk, 1)
                ),
            }
    assert found == {
        "torch": {
            "statistics": 16, "gradient": 13, "factor": 14, "factor, both ways": 16, "states, load": 30, "states, store": 76,
        },
        "triton": {
            "statistics": 1, "gradient": 1, "factor": 3, "factor, both ways": 3, "states, load": 2, "states, store": 3,
        },
    }  # fmt: skip


@pytest.mark.grid
def test_kernels_compile_for_an_ampere_and_a_hopper() -> None:
    """By Triton's own compiler and its assembler, which need no GPU; not interpreted, so in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([os.getcwd(), str(FOLDER), str(TORCHAO)])
    program = [sys.executable, "-W", "ignore", "-m", "tests.compile_kernels"]
    environment["PYTHONPATH"] = path
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40, done.stdout


# --- codes of messages


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", torch.float32), ("int8", torch.bfloat16), ("int4", torch.float16)])
def test_messages_of_any_strides_and_lengths_are_torchs(kind: Any, dtype: torch.dtype) -> None:
    codec = BlockCodec(kind, 16)
    x = torch.randn(2, 3, 37, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE).transpose(0, 1)
    x[0, 0, 0] *= 30
    x[1] *= 1e-4
    x[2, 0] = 0
    for rows in (x, x[2], x[1, 1]):
        message, out = codec.encode(rows), torch.empty(rows.shape, device=DEVICE)
        codec.decode(message, out)
        with fused_kernels():
            found, read = codec.encode(rows), torch.empty(rows.shape, device=DEVICE)
            codec.decode(found, read)
        assert torch.equal(found, message)
        assert torch.equal(read, out)


def test_there_may_be_more_rows_than_a_dim_of_programs_has() -> None:
    from framework.comm import triton_codec

    grids: list[tuple[int, ...]] = []
    rows, codec = torch.ones(70_000, 20, device=DEVICE), BlockCodec("fp8", 16)
    message = torch.zeros(70_000, codec.message_bytes(20), dtype=torch.uint8, device=DEVICE)

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **options: None

    with patch.multiple(triton_codec, _encode=Launches(), _decode_sum=Launches()):
        triton_codec.TritonCodes().encode(codec, rows, message)
        triton_codec.TritonCodes().decode_sum(codec, message[None], rows)
    assert [(grid[0], max(grid[1:], default=1)) for grid in grids] == [(140_000, 1)] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_numbers_that_are_not_finite_are_seen_behind_kernels(kind: Any, bad: float) -> None:
    x = torch.ones(48, device=DEVICE)
    x[20] = bad
    with fused_kernels():
        codec, out = BlockCodec(kind, 16), torch.empty(48, device=DEVICE)
        codec.decode(codec.encode(x), out)
    assert out.isnan().tolist() == [False] * 16 + [True] * 16 + [False] * 16
