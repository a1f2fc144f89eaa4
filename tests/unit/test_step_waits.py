"""What of ours, in a training step, would make the host wait for a GPU: nothing, and copies go through one door.

Counted on the CPU, where waits cost nothing, by what the calls are.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import framework
from framework.comm import transfer
from framework.comm.connect import connect
from framework.comm.transfer import pin, upload
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Model, Offload, Optim, Parallel, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.train.sums import Flags
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

PACKAGE = Path(framework.__file__).parent
DOOR = Path(transfer.__file__)

# The host reads a value of the device, or a shape that depends on one.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal"}
ASKS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero", "masked_select"}


@dataclass
class Count:
    """Calls by the line that made them: what `waits`, torch's own lines being those of who called it, and what may be copied from
    the host to a device. There torch's own are left out: its optimizers do so with what is on the device already."""

    waits: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)


def caller(skips_torch: bool) -> str:
    """`path:line` of who made the call."""
    skipped = (__file__, *(["/torch/"] if skips_torch else []))
    frames = traceback.extract_stack()
    frame = [frame for frame in frames if not any(each in frame.filename for each in skipped)][-1]
    return f"{frame.filename}:{frame.lineno}"


class CountFunctions(TorchFunctionMode):
    """What Python asks of tensors."""

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ASKS:
            self.count.waits.append(caller(skips_torch=True))
        makes = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
        moves = name == "to" and any(isinstance(each, torch.device) for each in (*args[1:], *kwargs.values()))
        if makes or moves or name == "cuda":
            self.count.copies.append(caller(skips_torch=False))
        return func(*args, **kwargs)


class CountOperators(TorchDispatchMode):
    """What operators make of it."""

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func.overloadpacket.__name__ in READS or by_mask:
            self.count.waits.append(caller(skips_torch=True))
        return func(*args, **(kwargs or {}))


def count_calls(call: Callable[[], Any]) -> Count:
    count = Count()
    with CountFunctions(count), CountOperators(count):
        call()
    return count


def ours(calls: Sequence[str]) -> list[str]:
    return [call.removeprefix(f"{PACKAGE}/") for call in calls if call.startswith(str(PACKAGE))]


def build_run(recipe: Recipe, model: str = "llama", *where: Any) -> tuple[TrainingRun, list[Any]]:
    config = build_config(family(model))
    config.use_cache = False
    mesh = connect(topology_of(recipe, config), CPU, *where)
    packs = recipe.data.isolates
    (batch,) = make_batches(config, 1, recipe.batch.sequences_per_step or 0, recipe.batch.context, 11, packs)
    return build(make_plan(recipe, config), mesh), share(batch, recipe.batch.sequences_per_microbatch, mesh)


PLAIN = small_recipe("fp32", 1, accumulation=3, clip_norm=0.5)
RECIPES = {
    "plain": PLAIN,
    "stage 3, activation checkpointing": replace(
        PLAIN, zero=Zero(stage=3), memory=Memory(activation_checkpointing="full")
    ),
    "bf16, lion, chunked loss": replace(
        small_recipe("bf16", 1), optim=Optim(name="lion", clip_norm=0.5), memory=Memory(chunked_loss=True)
    ),
    "fp16": replace(small_recipe("fp32", 1), precision=Precision("fp16")),
    "activation offload": replace(PLAIN, memory=Memory(offload=Offload(activations=1.0))),
    "fp64, sgd": replace(small_recipe("fp64", 1), optim=Optim(name="sgd")),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_never_waits_and_copies_through_one_door(name: str) -> None:
    run, microbatches = build_run(RECIPES[name])
    train_step(run, microbatches, 0, 1e-3)  # what only a first step does
    count = count_calls(lambda: train_step(run, microbatches, 1, 1e-3, Flags(stop=True)))
    assert not ours(count.waits)
    elsewhere = [call for call in ours(count.copies) if not call.startswith(str(DOOR.relative_to(PACKAGE)))]
    assert not elsewhere
    assert len(ours(count.copies)) == 1 + 2 * len(microbatches)  # the step's sums; inputs and labels of each microbatch


def count_of_rank(rank: int, world: int, rendezvous: str, recipe: Recipe, model: str) -> tuple[list[str], list[str]]:
    """Body: all waits of a rank's second step, those of the model's code too, and copies beside the door."""
    run, microbatches = build_run(recipe, model, rendezvous, rank)
    train_step(run, microbatches, 0, 1e-3)
    count = count_calls(lambda: train_step(run, microbatches, 1, 1e-3))
    run.mesh.close()
    return count.waits, [call for call in ours(count.copies) if not call.startswith(str(DOOR.relative_to(PACKAGE)))]


@pytest.mark.parametrize(
    ("model", "context", "policy"),
    [
        pytest.param("gemma2", "ring", "full", marks=pytest.mark.grid),
        ("llama4_text", "ulysses", "selective"),
        ("gpt_oss", None, "full"),
        pytest.param("llama", "gather", "sqrt", marks=pytest.mark.grid),
    ],
)
def test_attention_to_documents_never_waits(pool: RankPool, model: str, context: Any, policy: Any) -> None:
    """With windows, chunks and sinks, on one rank and across ranks, in forward, backward and recomputation."""
    cp = 1 if context is None else 2
    recipe = small_recipe("fp32", cp, accumulation=3, parallel=Parallel(cp=cp, context=context or "ring"))
    batch, data = replace(recipe.batch, context=40), replace(recipe.data, pack="documents")
    recipe = replace(recipe, batch=batch, data=data, memory=Memory(activation_checkpointing=policy))
    for waits, elsewhere in pool.run(cp, count_of_rank, recipe, model):
        assert not [call for call in waits if "/experts" not in call and "/moe" not in call]
        assert not elsewhere


@pytest.mark.parametrize(("policy", "forwards"), [("none", 1), ("full", 2)])
def test_a_rank_waits_once_for_the_rows_of_experts(pool: RankPool, policy: Any, forwards: int) -> None:
    """In each layer of experts, for each microbatch, and for a forward that is computed again."""
    recipe = small_recipe("fp32", 2, accumulation=3, parallel=Parallel(ep=2))
    recipe = replace(recipe, memory=Memory(activation_checkpointing=policy))
    layers = build_config(family("mixtral")).num_hidden_layers
    for waits, elsewhere in pool.run(2, count_of_rank, recipe, "mixtral"):
        assert [call.rpartition(":")[0] for call in ours(waits)] == ["comm/transfer.py"] * (3 * layers * forwards)
        assert not elsewhere


@pytest.mark.parametrize(
    ("parallel", "model"),
    [(Parallel(ep=2, expert_padding=2.0), Model()), (Parallel(ep=2), Model(expert_capacity=1.25))],
    ids=["padding", "capacity"],
)
def test_rows_in_padded_buffers_make_no_rank_wait(pool: RankPool, parallel: Parallel, model: Model) -> None:
    """But for groups of rows that a CPU multiplies one by one: their numbers are in its own memory."""
    recipe = replace(small_recipe("fp32", 2, accumulation=3, parallel=parallel), model=model)
    recipe = replace(recipe, memory=Memory(activation_checkpointing="full"))
    for waits, elsewhere in pool.run(2, count_of_rank, recipe, "mixtral"):
        assert {call.rpartition(":")[0] for call in ours(waits)} == {"model/matmul.py"}
        assert not elsewhere


def test_counting_the_load_of_experts_and_moving_biases_does_not_wait() -> None:
    run, microbatches = build_run(replace(PLAIN, model=Model(router_bias_rate=0.01)), "deepseek_v3")
    train_step(run, microbatches, 0, 1e-3)
    count = count_calls(lambda: train_step(run, microbatches, 1, 1e-3, is_reported=True))
    assert not ours(count.waits)
    assert len(ours(count.copies)) == 1 + 2 * len(microbatches)


def test_a_step_that_misses_a_parameter_does_not_wait_to_know_who_reached_it() -> None:
    run, microbatches = build_run(PLAIN)
    train_step(run, microbatches, 0, 1e-3)  # what only a first step does
    (stage,) = run.stages.values()
    missed = next(place for _, slot, place in stage.gradients.grad_views if slot.name == "model.norm.weight")
    before = missed.parameter.detach().clone()
    norm = stage.model.model.get_submodule("model.norm")
    norm.forward = lambda x: x  # type: ignore[method-assign]
    count = count_calls(lambda: train_step(run, microbatches, 1, 1e-1))
    assert not missed.is_reached
    assert not ours(count.waits)
    assert torch.equal(missed.parameter, before)


def test_the_counter_counts() -> None:
    x = torch.arange(4.0)
    count = count_calls(
        lambda: [x.sum().item(), bool(x[0]), x[x > 1], x.tolist(), x.nonzero(), torch.tensor(1, device=CPU)]
    )
    assert len(count.waits) >= 5
    assert len(count.copies) == 1


class HostTensor:
    """What the door does with a tensor of the host, told to `calls`."""

    def __init__(self, calls: list[str], is_pinned: bool):
        self.calls, self._is_pinned = calls, is_pinned

    def is_pinned(self) -> bool:
        return self._is_pinned

    def pin_memory(self) -> "HostTensor":
        self.calls.append("copy to pinned memory")
        return HostTensor(self.calls, True)

    def to(self, device: torch.device, non_blocking: bool = False) -> None:
        waits = device.type == "cuda" and not (non_blocking and self._is_pinned)
        self.calls.append(f"{'wait' if waits else 'start a copy'} to {device}")


@pytest.mark.parametrize(
    ("device", "is_pinned", "expected"),
    [
        ("cuda:1", False, ["copy to pinned memory", "start a copy to cuda:1"]),
        ("cuda:1", True, ["start a copy to cuda:1"]),
        ("cpu", False, ["start a copy to cpu"]),
    ],
)
def test_the_door_copies_from_pinned_memory_only(device: str, is_pinned: bool, expected: list[str]) -> None:
    calls: list[str] = []
    upload(HostTensor(calls, is_pinned), torch.device(device))  # type: ignore[arg-type]
    assert calls == expected


def test_on_a_cpu_nothing_is_copied() -> None:
    x: Tensor = torch.ones(3)
    assert upload(x, CPU) is x
    assert pin(x, CPU) is x


class CudaDevice:
    type = "cuda"


def test_all_saves_copy_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 that torch deals out in turn, to NCCL as well."""
    made: list[str] = []
    device: Any = CudaDevice()
    monkeypatch.setattr(transfer, "Arrival", lambda device: SimpleNamespace(wait=lambda: made.append("waits")))
    monkeypatch.setattr(transfer, "choose_current", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append("stream"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for _ in range(3):
        with transfer.Moment(device).copies():
            made.append("copies")
    assert made == ["stream", *["waits", "copies"] * 3]
