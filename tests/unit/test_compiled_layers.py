"""Compiled layers beside eager ones on one rank: linear layers behind an operator, and what selective checkpointing keeps there.

Graphs run operator by operator (`aot_eager`): the compiler's own sums are in tests/ranks/test_compile.py.
"""

from tests.torchao_folder import FOLDER  # noqa: F401  # isort: skip  first: what follows imports torchao from there

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from framework.comm.connect import connect
from framework.model.matmul import Matmul
from framework.model.opaque import OpaqueExperts
from framework.parallel.parallelize import find_eager_layers
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Precision
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import RECURRENT, build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, small_recipe, topology_of

pytestmark = IN_TURN

STEPS = 3
# Multiples of 16, which fp8 asks for.
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def train(
    name: str, precision: str, memory: Memory, packs: bool = False
) -> tuple[TrainingRun, dict[str, Tensor], list[float]]:
    """(the run, its main gradients after the first step, the losses of all)."""
    torch._dynamo.reset()
    counters.clear()
    recipe = replace(small_recipe("bf16" if precision == "fp8" else precision, 1, 2, 4), memory=memory)
    if precision == "fp8":
        recipe = replace(recipe, precision=Precision("fp8", "fp32", "fp32"))
    if packs:
        recipe = replace(recipe, data=replace(recipe.data, pack="documents"))
    found = next((each for each in RECURRENT if each.name == name), None) or family(name)
    config = build_config(found, **(WIDTHS if name in ("llama", "gpt2") else {}))
    mesh = connect(topology_of(recipe, config), CPU)
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        run = build(make_plan(recipe, config), mesh)
        losses, gradients = [], {}
        for step, batch in enumerate(make_batches(config, STEPS, 4, recipe.batch.context, 11, packs)):
            losses.append(train_step(run, share(batch, 2, mesh), step, 1e-2).read().loss)
            if step == 0:
                gradients = read_gradients(run)
    mesh.close()
    return run, gradients, losses


def read_gradients(run: TrainingRun) -> dict[str, Tensor]:
    views = {name: view for buffer in run.stages[0].buffers for name, view in buffer.grad_views.items()}
    return {name: view.view.clone() for name, view in views.items()}


POLICIES = ("none", "selective", "full")
FORMS = (("llama", "fp64"), ("llama", "bf16"), ("gpt2", "fp32"), ("llama", "fp8"))
# Each form, and each policy, once.
SHOWN = (("llama", "fp64", "none"), ("gpt2", "fp32", "full"), ("llama", "fp8", "selective"))


@pytest.mark.parametrize(
    ("name", "precision", "policy"),
    few_of(
        [(*form, policy) for form in FORMS for policy in POLICIES],
        lambda name, precision, policy: (name, precision, policy) in SHOWN,
    ),
)
def test_gradients_are_those_of_eager_layers(name: str, precision: str, policy: Any) -> None:
    _, expected, losses = train(name, precision, Memory(activation_checkpointing=policy, compile="never"))
    _, found, found_losses = train(name, precision, Memory(activation_checkpointing=policy, compile="always"))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for each, gradient in expected.items():
        # The same kernels in the same order but for norms and activations, whose functions aot_eager writes out.
        torch.testing.assert_close(
            found[each], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, each=each: f"{each}: {text}"
        )


@pytest.mark.parametrize(
    ("name", "graphs", "policy"),
    few_of(
        [(name, graphs, policy) for name, graphs in (("llama", 1), ("gemma2", 2)) for policy in ("selective", "full")],
        lambda name, graphs, policy: (name, policy) == ("llama", "selective"),
    ),
)
def test_attention_is_one_operator_also_of_documents(name: str, graphs: int, policy: Any) -> None:
    """The number and the lengths of documents differ between microbatches: nothing is compiled again. Layers with a window and
    without have a graph each."""
    found = []
    for word in ("never", "always"):
        _, gradients, losses = train(name, "fp64", Memory(activation_checkpointing=policy, compile=word), packs=True)  # type: ignore[arg-type]
        found.append((gradients, losses))
    (expected, losses), (gradients, found_losses) = found
    assert counters["stats"]["unique_graphs"] == graphs
    assert found_losses == pytest.approx(losses, rel=1e-9)
    for each, gradient in expected.items():
        torch.testing.assert_close(gradients[each], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "policy"),
    few_of(
        [("gpt_oss", "none"), ("gpt_oss", "selective"), ("llama4_text", "selective")],
        lambda name, policy: name == "llama4_text",
    ),
)
def test_layers_of_several_graphs_that_keep_outputs_by_name_stay_eager(name: str, policy: Any) -> None:
    """Graphs end at llama4's attention; sinks, windows and chunks of documents are those of eager layers."""
    _, expected, losses = train(name, "fp64", Memory(activation_checkpointing=policy, compile="never"), packs=True)
    _, gradients, found = train(name, "fp64", Memory(activation_checkpointing=policy, compile="always"), packs=True)
    assert bool(counters["stats"]) == (name == "gpt_oss")
    assert not counters["graph_break"]
    assert found == pytest.approx(losses, rel=1e-9)
    for each, gradient in expected.items():
        torch.testing.assert_close(gradients[each], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", few_of([("full",), ("selective",)], lambda policy: policy == "full"))
def test_layers_with_a_recurrent_mixer_stay_eager_and_others_are_compiled_once(policy: Any) -> None:
    """The documents with which such a layer is called are of a microbatch: a graph would be of one."""
    memory = Memory(activation_checkpointing=policy, compile="always")
    _, expected, losses = train("qwen3_5_text", "fp64", replace(memory, compile="never"), packs=True)
    _, gradients, found = train("qwen3_5_text", "fp64", memory, packs=True)
    recipe = replace(small_recipe("fp64", 1, 2, 4), memory=memory)
    stage = (
        make_plan(recipe, build_config(next(each for each in RECURRENT if each.name == "qwen3_5_text")))
        .of_rank(0)
        .stages[0]
    )
    assert find_eager_layers(stage.model.model, stage.plan) == {
        f"layers.{number}": "Qwen3_5GatedDeltaNet, a recurrent mixer" for number in (0, 2)
    }
    # All microbatches have other documents.
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert found == pytest.approx(losses, rel=1e-9)
    for each, gradient in expected.items():
        torch.testing.assert_close(gradients[each], gradient, rtol=1e-9, atol=1e-12)


def test_selective_checkpointing_computes_kept_layers_once() -> None:
    forwards: Counter[int] = Counter()
    whole = Matmul.forward

    def count(self: Matmul, *args: Any, **kwargs: Any) -> Tensor:
        forwards[id(self._layer)] += 1
        return whole(self, *args, **kwargs)

    memory = Memory(activation_checkpointing="selective", compile="always", kept_operations=["attention", "up_proj"])
    with patch.object(Matmul, "forward", count):
        run, *_ = train("llama", "fp32", memory)
    modules = run.stages[0].model.model.named_modules()
    found = {path: forwards[id(module)] / (2 * STEPS) for path, module in modules if id(module) in forwards}
    # Backward asks for none of the outputs of a layer's last matmul.
    once = ("up_proj", "down_proj", "lm_head")
    assert found == {path: 1 if path.endswith(once) else 2 for path in found}


class DeferredView:
    """A main gradient that takes its factors later."""

    is_deferred = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.factors: list[Tensor] = []

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        self.factors += [left, right]


def test_factors_that_are_left_for_later_have_memory_of_their_own() -> None:
    """The compiler writes its next tensors where those were that its graph has no more use for."""
    layer = nn.Linear(4, 3)
    matmul, view = Matmul(layer, False), DeferredView(layer.weight)
    matmul.write_gradient_to(view)  # type: ignore[arg-type]
    x, dy = torch.randn(2, 4), torch.randn(2, 3)
    torch.ops.meshwright.weight_gradient(dy, x, matmul.tick)
    assert not {each.data_ptr() for each in view.factors} & {x.data_ptr(), dy.data_ptr()}
    assert all(map(torch.equal, view.factors, (dy, x)))


def test_operators_do_as_torch_asks_of_them() -> None:
    layer = nn.Linear(4, 3)
    matmul, view = Matmul(layer, False), DeferredView(layer.weight)
    matmul.write_gradient_to(view)  # type: ignore[arg-type]
    x = torch.randn(2, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.meshwright.linear.default, (x, matmul.tick, layer.bias, None, 3, "q_proj"))


class Doubling:
    """Experts whose output is twice their input, weighted."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.opaque = OpaqueExperts(nn.ParameterList([self.weight]), self.compute)
        self.opaque.give_number()

    def compute(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden * self.weight * weights.sum(-1, keepdim=True)

    def call(self, hidden: Tensor, is_kept: bool = True) -> tuple[Tensor, Any]:
        index, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
        out, call = torch.ops.meshwright.experts(hidden, index, weights, self.opaque.number, is_kept, "")
        return out, call


def test_the_graph_of_experts_lives_as_long_as_their_call() -> None:
    experts, hidden = Doubling(), torch.randn(3, 4, requires_grad=True)
    out, call = experts.call(hidden)
    held = ref(call.graph[0][0])
    assert held() is not None
    del out, call
    assert held() is None
    _, without = experts.call(hidden, is_kept=False)
    assert not hasattr(without, "graph")


def test_experts_get_their_gradients_within_the_operator() -> None:
    experts, hidden = Doubling(), torch.randn(3, 4, requires_grad=True)
    out, _ = experts.call(hidden)
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.full((3, 4), 4.0))
    assert experts.weight.grad == pytest.approx(2 * hidden.sum().item(), rel=1e-6)


# Operators that start no kernel: views, memory, and what is done if at all by an operator within.
NO_LAUNCH = (
    "view",
    "empty",
    "reshape",
    "transpose",
    "detach",
    "expand",
    "squeeze",
    "slice",
    "select",
    "alias",
    "as_strided",
)


def count_launches(step: Callable[[], Any]) -> int:
    """Kernels of a step: those that inductor has made, and torch's operators on tensors of more than a number."""
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    launches = 0
    for event in found.events():
        above = event.cpu_parent
        while above is not None and not above.name.startswith(("aten::", "graph_")):
            above = above.cpu_parent
        is_large = any(prod(shape) > 1 for shape in event.input_shapes if shape)
        is_copy = event.name not in ("aten::contiguous", "aten::to") or bool(event.cpu_children)
        is_operator = event.name.startswith("aten::") and is_large and is_copy
        is_operator &= event.name != "aten::t" and not any(word in event.name for word in NO_LAUNCH)
        launches += above is None and (is_operator or "cpp_fused" in event.name)
    return launches


@pytest.mark.grid
def test_a_layer_launches_about_as_many_kernels_as_a_compiled_one_of_transformers(tmp_path: Path) -> None:
    """Of a further microbatch, without what is once a step: matmuls, attention, fused kernels, sums of gradients."""

    def run_ours(num_layers: int, microbatches: int) -> int:
        recipe = replace(small_recipe("bf16", 1, microbatches, 2 * microbatches), memory=Memory(compile="always"))
        config = build_config(family("llama"), num_hidden_layers=num_layers, use_cache=False)
        mesh = connect(topology_of(recipe, config), CPU)
        run = build(make_plan(recipe, config), mesh)
        (batch,) = make_batches(config, 1, 2 * microbatches, recipe.batch.context, 11)
        found = count_launches(lambda: train_step(run, share(batch, 2, mesh), 0, 1e-2).read())
        mesh.close()
        return found

    def run_stock(num_layers: int, microbatches: int) -> int:
        config = build_config(family("llama"), num_hidden_layers=num_layers, use_cache=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
        tokens = torch.randint(0, 97, (2, 9))

        def step() -> None:
            for _ in range(microbatches):
                model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()

        return count_launches(step)

    def of_layer(run: Callable[[int, int], int]) -> float:
        torch._dynamo.reset()
        few, many = (run(num_layers, 2) - run(num_layers, 1) for num_layers in (2, 4))
        return (many - few) / 2

    folder = patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    with folder, torch._inductor.config.patch({"compile_threads": 1, "cpp.enable_kernel_profile": True}):
        stock, ours = of_layer(run_stock), of_layer(run_ours)
    assert stock == 44  # 21 matmuls, 2 of attention, 12 fused, 9 sums
    assert ours <= 1.1 * stock  # 48: attention's inputs and output are copied by themselves
