"""The head and its loss in chunks of tokens: equal to logits and a loss of them, without logits; of every family."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GraniteForCausalLM, PreTrainedModel

from framework.comm.connect import connect
from framework.errors import ModelError
from framework.mesh.topology import Topology
from framework.model.chunked_loss import ChunkedLoss, LogitMap, find_logit_map
from framework.model.load import build_meta, choose_experts
from framework.model.loss import IGNORE, Loss, TokenLoss, chunk_bytes, chunk_size
from framework.model.objective import count_tokens
from framework.parallel.zero.buffers import GradientState
from framework.plan.plan import Plan, make_plan, unconnected
from framework.plan.policies import keep_chunked_loss
from framework.recipe.schema import Batch, Memory, Model, Parallel
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import keep_double, make_batches
from framework.verify.layout import share
from tests.evaluation import evaluate
from tests.families import FAMILIES, Family, build_config, family, is_kind
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, small_recipe, topology_of
from tests.ranks.tensor_parity import NOISE_SHARE, relative_error

pytestmark = IN_TURN

ONE_RANK = unconnected(Topology(), 0)["tp"]
CHUNK = 5
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
# Stock code that has no fp64: xglm puts fp64's lowest number into an fp32 tensor.
WITHOUT_FP64 = ("xglm",)

# --- families


@pytest.mark.parametrize("each", few_of(FAMILIES, is_kind), ids=lambda each: each.name)
def test_every_family_has_equal_loss_and_gradients(each: Family) -> None:
    config, dtype = build_config(each), torch.float32 if each.name in WITHOUT_FP64 else torch.float64
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(dtype).train()
    choose_experts(model, "auto", dtype)
    head = model.get_output_embeddings()
    with torch.no_grad():
        # Logits of some size, where a soft-cap bends them: initial ones are all but zero.
        head.weight.mul_(30)
        if head.bias is not None:
            head.bias.normal_()
    vocabulary = head.weight.shape[0]
    expected = differentiate(model, TokenLoss(ONE_RANK, vocabulary))
    logit_map = find_logit_map(build_meta(config), dtype)
    found = differentiate(model, ChunkedLoss(head, (), logit_map, ONE_RANK, vocabulary, CHUNK))
    assert found.keys() == expected.keys()
    # A key's bias cancels in the softmax: its gradient is rounding noise.
    floor = NOISE_SHARE * max(float(each.abs().max()) for each in expected.values())
    errors = {name: relative_error(found[name], expected[name], floor) for name in expected}
    assert max(errors.values()) <= TOLERANCES[dtype], errors


def differentiate(model: PreTrainedModel, loss_of: Loss) -> dict[str, Tensor]:
    """The loss and the gradient of each parameter. The loss is scaled, as fp16 scales it: its gradient is not 1."""
    torch.manual_seed(7)
    model.zero_grad()
    ids = torch.randint(3, 97, (2, 9))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape) < 0.3, IGNORE)
    with keep_double(model.dtype):
        loss_of.expect(labels)
        output = model(input_ids=ids, use_cache=False)
        loss = loss_of(output.logits, labels, count_tokens(labels, None).sum())
        torch.autograd.backward(loss, torch.tensor(1024.0, dtype=loss.dtype))
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach()} | gradients


def test_what_scales_and_bends_logits_is_found() -> None:
    found = {
        name: find_logit_map(build_meta(build_config(family(name))), torch.bfloat16) for name in ("gemma2", "cohere")
    }
    y = torch.randn(4, 97, dtype=torch.float64) * 50
    assert torch.equal(found["gemma2"](y), 30 * torch.tanh(y / 30))
    assert torch.equal(found["cohere"](y), 0.0625 * y)


class OverTokens(GraniteForCausalLM):
    """Centres its logits over the tokens of a sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - output.logits.mean(1, keepdim=True)
        return output


class Twice(GraniteForCausalLM):
    """Calls its head for other hidden states as well."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class InPlace(GraniteForCausalLM):
    """Masks a part of the vocabulary."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., 3:5] = -100.0
        return output


@pytest.mark.parametrize(
    ("kind", "said"), [(OverTokens, "aten.mean"), (Twice, "one call of its head"), (InPlace, "aten.")]
)
def test_a_head_that_does_more_is_refused_by_name(kind: type[GraniteForCausalLM], said: str) -> None:
    with torch.device("meta"):
        model = kind(build_config(family("granite")))
    with pytest.raises(ModelError, match=f"memory.chunked_loss=true.*granite.*{said}.*memory.chunked_loss=false"):
        find_logit_map(model, torch.float32)
    assert "forward" not in model.get_output_embeddings().__dict__  # and nothing is left behind


# --- a run


LONG = Batch(sequences_per_step=4, sequences_per_microbatch=2, context=160)
WORDS = {"vocab_size": 997}
NUM_TOKENS = 2 * 160


def build_long(name: str, memory: Memory, **groups: Any) -> tuple[TrainingRun, list[Any]]:
    config = build_config(family(name), **WORDS, max_position_embeddings=256)
    config.use_cache = False
    recipe = replace(small_recipe("fp32", 1), batch=LONG, memory=replace(memory, compile="never"), **groups)
    mesh = connect(topology_of(recipe, config), CPU)
    from framework.train.build import build

    (batch,) = make_batches(config, 1, 4, 160, seed=11)
    return build(make_plan(recipe, config), mesh), share(batch, 2, mesh)


class LargestAllocation(TorchDispatchMode):
    """The most elements of a storage that any operation has given, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dtype.is_floating_point:
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.itemsize)
        return result


@contextmanager
def largest_saved() -> Iterator[list[int]]:
    numels = [0]

    def note(tensor: Tensor) -> Tensor:
        numels[0] = max(numels[0], tensor.untyped_storage().nbytes() // tensor.itemsize)
        return tensor

    with saved_tensors_hooks(note, lambda each: each):
        yield numels


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_no_tensor_of_all_tokens_logits_ever_exists(name: str) -> None:
    """In training and in validation, with a soft-cap as well, whose own steps a chunk keeps."""
    logits = NUM_TOKENS * WORDS["vocab_size"]
    for chunked in (True, False):
        run, microbatches = build_long(name, Memory(chunked_loss=chunked))
        with LargestAllocation() as allocated, largest_saved() as saved:
            train_step(run, microbatches, 0, 1e-3)
        with LargestAllocation() as validating:
            evaluate(run, microbatches)
        found = [allocated.numel, saved[0], validating.numel]
        assert all((numel < logits) is chunked for numel in found), (chunked, found, logits)
        if chunked and name == "llama":  # gemma2's attention has a matrix that is larger than the logits of a chunk
            assert allocated.numel == 128 * WORDS["vocab_size"]


def test_steps_and_validation_are_those_of_whole_logits_also_with_a_frozen_head() -> None:
    for frozen in ([], ["lm_head"]):
        found = []
        for chunked in (True, False):
            run, microbatches = build_long(
                "cohere" if not frozen else "llama", Memory(chunked_loss=chunked), model=Model(freeze=frozen)
            )
            losses = [train_step(run, microbatches, step, 1e-3).read() for step in range(2)]
            found.append(
                [each for values in losses for each in (values.loss, values.gradient_norm)]
                + [evaluate(run, microbatches)]
            )
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_weights_left_for_later_are_those_of_a_whole_backward() -> None:
    """A backward in two halves: between them nothing of the size of logits is kept, and no gradient of the head has come."""
    found = []
    for is_split in (True, False):
        run, microbatches = build_long("llama", Memory(chunked_loss=True))
        (stage,) = run.stages.values()
        inputs = step_inputs(microbatches)
        stage.gradients.start_step()
        stage.start_step(inputs)
        (loss,) = stage.forward(0, ())
        edge = [torch.autograd.graph.get_gradient_edge(loss)]
        view = next(view for _, slot, view in stage.gradients.grad_views if "lm_head" in slot.name)
        if is_split:
            with LargestAllocation() as allocated:
                left = stage.backward_input(edge, ())
                assert view.state is not GradientState.WRITTEN
                stage.backward_weights(left, True)
            assert allocated.numel < NUM_TOKENS * WORDS["vocab_size"]
        else:
            stage.backward(edge, (), True)
        stage.gradients.finish()
        found.append(view.view.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-9)


def step_inputs(microbatches: list[Any]) -> Any:
    from framework.train.stage import StepInputs

    num_tokens = torch.stack([count_tokens(each.labels, None).sum() for each in microbatches]).sum()
    seeds = [(0, "dropout", 0, index) for index in range(len(microbatches))]
    return StepInputs(microbatches, seeds, num_tokens, 2, torch.ones(()))


# --- what is decided


def plan_of(device: str, chunked: bool | str, context: int = 4096, tp: int = 1) -> Plan:
    """Of a microbatch of one sequence."""
    batch = Batch(sequences_per_step=1, sequences_per_microbatch=1, context=context)
    small = small_recipe("bf16", tp, parallel=Parallel(tp=tp))
    recipe = replace(
        small, batch=batch, memory=Memory(chunked_loss=chunked), launch=replace(small.launch, device=device)
    )  # type: ignore[arg-type]
    return make_plan(recipe, build_config(family("llama"), vocab_size=128_000))


def test_auto_is_on_where_logits_are_more_than_a_share_of_the_device() -> None:
    """12,000 tokens of 128,000 words are 3.1 GB in bf16: more than 3% of 80 GiB, and half of that is less."""
    assert plan_of("cuda", "auto", 12_000).recipe.memory.chunked_loss is True
    # Half of the tokens, or half of the vocabulary; a rank on a CPU has a fifth of that memory, and torch's operations.
    for half in ({"context": 6000}, {"context": 12_000, "tp": 2}):
        assert plan_of("cuda", "auto", **half).recipe.memory.chunked_loss is False
        assert plan_of("cpu", "auto", **half).recipe.memory.chunked_loss is True
    # The shares that docs/memory.md states, to a token.
    for device, part, num_bytes in (("cuda", 0.03, 80 * 2**30), ("cpu", 0.01, 16 * 2**30)):
        most = int(part * num_bytes / (128_000 * 2))
        found = [plan_of(device, "auto", context).recipe.memory.chunked_loss for context in (most, most + 1)]
        assert found == [False, True]
    assert plan_of("cuda", False).logit_map is None
    assert plan_of("cuda", True, 64).logit_map is not None


@pytest.mark.parametrize(
    ("context", "tp", "tokens"), [(16_384, 1, 4096), (32_768, 4, 4096), (16_384, 0.25, 1024), (64, 1, 4096)]
)
def test_a_chunk_of_kernels_has_4096_tokens_unless_their_logits_are_more_than_a_gibibyte(
    context: int, tp: float, tokens: int
) -> None:
    """tp: 1 / 4 stands for a vocabulary that is four times as large."""
    words = round(128_000 / tp)
    assert chunk_size(context, words * 2, fused=True) == tokens
    assert chunk_bytes(context, words, 2, fused=True) == tokens * words * 2 <= 1.05 * 2**30


def test_a_small_model_in_the_place_of_a_large_one_chunks_as_that_does() -> None:
    """Verification shrinks the vocabulary: `auto` would then be off, and not what is run."""
    config = build_config(family("llama"), vocab_size=128_000)
    batch = Batch(sequences_per_step=1, sequences_per_microbatch=1, context=12_000)
    small = small_recipe("bf16", 1)
    recipe = replace(small, batch=batch, launch=replace(small.launch, device="cuda"))
    assert keep_chunked_loss(recipe, config).memory.chunked_loss is True
    assert keep_chunked_loss(recipe, build_config(family("llama"))) is recipe


def test_the_plan_states_what_is_counted() -> None:
    """Kept beside hidden states: a number for each token. While a chunk is computed: its logits, softmax and gradient."""
    config = build_config(family("llama"), **WORDS, max_position_embeddings=256)
    for precision in ("fp32", "bf16", "fp64"):
        recipe = replace(small_recipe(precision, 1), batch=LONG, memory=Memory(chunked_loss=True))
        plan = make_plan(recipe, config)
        dtype = plan.compute_dtype
        head = nn.Linear(32, 997, bias=False, dtype=dtype)
        loss_of = ChunkedLoss(head, (), LogitMap((), ()), ONE_RANK, 997)
        labels = torch.randint(0, 997, (2, 160))
        loss_of.expect(labels)
        x = torch.randn(2, 160, 32, dtype=dtype, requires_grad=True)
        peak = peak_of_step(loss_of, head, x, labels)
        stated = plan.activations.chunk_bytes
        around = (
            3 * 997 * 32 * 8 + 4 * NUM_TOKENS * 32 * 8 + 32 * NUM_TOKENS
        )  # gradients, dX, and numbers of each token
        assert stated <= peak <= stated + around, (precision, stated, peak)


def peak_of_step(loss_of: ChunkedLoss, head: nn.Module, x: Tensor, labels: Tensor) -> int:
    from tests.ranks.test_tensor_memory import peak_of

    with torch.profiler.profile(profile_memory=True) as profile:
        loss_of(head(x), labels, torch.tensor(1)).backward()
    return peak_of(profile)
