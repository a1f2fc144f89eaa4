"""Derived numbers and the rules between keys."""

from dataclasses import is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import RecipeError
from framework.recipe import layout_rules, machines, method_rules, run_rules
from framework.recipe.check import RULES, check_recipe
from framework.recipe.compose import compose
from framework.recipe.derive import derive, unpadded_lengths
from framework.recipe.describe import describe_derived
from framework.recipe.keys import list_paths
from framework.recipe.problem import Problem, Rule
from framework.recipe.schema import Batch, Data, Launch, Parallel, Recipe, Source, Train

SOUND = replace(
    Recipe(),
    batch=Batch(sequences_per_step=8),
    data=Data(sources={"a": Source("x")}, bpe_vocab=512),
)


def problems_of(*overrides: str) -> dict[str, Problem]:
    """Of the default recipe with overrides; one problem per key is part of the claim."""
    problems = compose(list(overrides)).problems
    assert len({problem.key for problem in problems}) == len(problems)
    return {problem.key: problem for problem in problems}


def recipe_with(ranks=1, sequences=None, tokens=None, microbatch=1, context=8, **degrees) -> Recipe:
    return replace(
        SOUND,
        batch=Batch(sequences, tokens, microbatch, context),
        parallel=Parallel(**degrees),
        launch=Launch(ranks=ranks),
    )


class TestDerive:
    def test_the_smallest_sound_recipe_has_no_problems(self):
        assert check_recipe(SOUND, {}) == []

    @given(
        dp=st.integers(1, 6), inner=st.tuples(*[st.integers(1, 3)] * 3), microbatch=st.integers(1, 5),
        accumulation=st.integers(1, 5), context=st.integers(2, 9), steps=st.integers(1, 9), fill=st.booleans(),
        in_tokens=st.booleans(),
    )  # fmt: skip
    def test_dp_and_accumulation_follow(self, dp, inner, microbatch, accumulation, context, steps, fill, in_tokens):
        tp, pp, cp = inner
        world, sequences = dp * tp * pp * cp, dp * microbatch * accumulation
        batch = {"tokens": sequences * context} if in_tokens else {"sequences": sequences}
        recipe = recipe_with(
            world, microbatch=microbatch, context=context, dp=None if fill else dp, tp=tp, pp=pp, cp=cp, **batch
        )
        d = derive(replace(recipe, train=Train(steps=steps)))
        assert (d.world, d.dp, d.tp, d.pp, d.cp, d.ep) == (world, dp, tp, pp, cp, 1)
        assert (d.sequences_per_step, d.accumulation) == (sequences, accumulation)
        assert (d.tokens_per_step, d.total_tokens) == (sequences * context, sequences * context * steps)

    @given(ranks=st.integers(1, 40), sequences=st.integers(1, 200), microbatch=st.integers(1, 12))
    def test_every_way_out_of_an_undivided_batch_is_one(self, ranks, sequences, microbatch):
        recipe = recipe_with(ranks, sequences, microbatch=microbatch)
        if sequences % (ranks * microbatch) == 0:
            assert derive(recipe).accumulation * ranks * microbatch == sequences
            return
        with pytest.raises(RecipeError):
            derive(recipe)
        (problem,) = check_recipe(recipe, {})
        ways = [way.split("=") for way in problem.fix.split("; or ")]
        assert ways
        for key, numbers in ways:
            for number in map(int, numbers.split(" or ")):
                changed = {
                    "batch.sequences_per_step": recipe_with(ranks, number, microbatch=microbatch),
                    "batch.sequences_per_microbatch": recipe_with(ranks, sequences, microbatch=number),
                    "launch.ranks": recipe_with(number, sequences, microbatch=microbatch),
                }[key]
                assert derive(changed).accumulation >= 1

    @given(ranks=st.integers(1, 24), dp=st.none() | st.integers(1, 6), degrees=st.tuples(*[st.integers(1, 4)] * 4))
    def test_the_degrees_multiply_to_the_world_or_the_ways_out_do(self, ranks, dp, degrees):
        tp, pp, cp, ep = degrees
        recipe = recipe_with(ranks, tokens=8 * 10**6, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
        fits = ranks % (tp * pp * cp) == 0 if dp is None else dp * tp * pp * cp == ranks
        if not fits:
            with pytest.raises(RecipeError, match=r"does not divide|but there are"):
                derive(recipe)
        elif (ranks // pp if ep > 1 else ranks) % ep:  # whole experts are divided among tp, too
            with pytest.raises(RecipeError, match="ep divides dp"):
                derive(recipe)

    def test_a_batch_in_tokens_is_whole_sequences(self):
        with pytest.raises(RecipeError, match=r"batch\.tokens_per_step=16 or 24"):
            derive(recipe_with(tokens=20))

    def test_the_message_names_the_numbers(self):
        (problem,) = check_recipe(recipe_with(4, 28, microbatch=2), {"batch.sequences_per_step": "here:1"})
        assert problem.message == "not a multiple of 4 dp ranks * 2 sequences per microbatch = 8"
        assert problem.fix == (
            "batch.sequences_per_step=24 or 32; or batch.sequences_per_microbatch=1 or 7; or launch.ranks=1 or 2 or 7"
        )
        assert problem.origin == "here:1"


class TestBatch:
    def test_stated_twice(self):
        problem = problems_of("batch.tokens_per_step=8192", "batch.sequences_per_step=4")["batch.sequences_per_step"]
        assert "batch.tokens_per_step=8192 as well" in problem.message
        assert problems_of("batch.tokens_per_step=8192", "batch.sequences_per_step=null") == {}

    def test_not_stated(self):
        assert "not stated" in problems_of("batch.sequences_per_step=null")["batch.sequences_per_step"].message

    def test_filling_the_world(self):
        composition = compose(["launch.ranks=4"])
        assert derive(composition.require()).dp == 4

    def test_degrees_that_do_not_multiply_to_the_world(self):
        problem = problems_of("launch.ranks=3", "parallel.dp=2")["parallel.dp"]
        assert problem.fix == "launch.ranks=2; or parallel.dp=3; or parallel.dp=null, which fills the ranks"


class TestContext:
    @pytest.mark.parametrize(
        ("context", "degrees"),
        [("ring", (1, 4)), ("gather", (1, 4)), ("ulysses", (4, 1)), ("[2,2]", (2, 2)), ("[1,4]", (1, 4))],
    )
    def test_degrees_of_ulysses_and_ring(self, context, degrees):
        recipe = compose(["parallel.cp=4", "launch.ranks=4", f"parallel.context={context}"]).require()
        assert (derive(recipe).ulysses, derive(recipe).ring) == degrees

    @pytest.mark.parametrize(
        ("overrides", "key", "message", "fix"),
        [
            (["parallel.context=[2,3]"], "parallel.context", "2 * 3 = 6 ranks", "[1,4] or [2,2] or [4,1]"),
            (["parallel.context=[4]"], "parallel.context", "two degrees", "[1,4] or [2,2] or [4,1]"),
            (["parallel.context=[0,4]"], "parallel.context", "at least 1", ""),
            (["parallel.context=zigzag"], "parallel.context", "one of ring, ulysses, gather", ""),
            (["parallel.cp=1", "parallel.context=gather"], "parallel.context", "do nothing", "parallel.cp=2 or more"),
            (
                ["parallel.context=ulysses", "batch.context=5"],
                "batch.context",
                "rank without a token",
                "=7 or 8, or a multiple of 4",
            ),
            (["batch.context=3"], "batch.context", "cut into 8 parts", "=4 or 5, or a multiple of 8"),
            (
                ["parallel.context=ulysses", "model.config.num_attention_heads=6"],
                "parallel.context",
                "a Ulysses degree of 4 does not divide the 6 heads",
                "parallel.context=[1,4] or [2,2]; or ring",
            ),
            (
                ["parallel.context=[2,2]", "parallel.tp=2", "launch.ranks=8", "model.config.num_attention_heads=6"],
                "parallel.context",
                "the 3 heads of a rank (num_attention_heads=6 / parallel.tp=2)",
                "parallel.context=[1,4]; or ring",
            ),
            (["model.attention=sdpa"], "model.attention", "computed by Meshwright", "model.attention=auto"),
        ],
    )
    def test_degrees_that_cannot_work(self, overrides, key, message, fix):
        problems = problems_of("parallel.cp=4", "launch.ranks=4", *overrides)
        assert problems.keys() == {key}
        assert message in problems[key].message
        assert fix in problems[key].fix

    def test_tokens_count_once_however_many_ranks_divide_a_sequence(self):
        """A rate per rank that forgot cp would be shown twice as large with cp=2, and so would the tokens of a run."""
        one, two = (derive(compose([f"launch.ranks={n}", f"parallel.cp={n}"]).require()) for n in (1, 2))
        assert (one.tokens_per_step, one.total_tokens) == (two.tokens_per_step, two.total_tokens)
        assert one.tokens_of_rank == 2 * two.tokens_of_rank == one.tokens_per_step

    def test_check_says_what_a_rank_has_and_which_lengths_need_no_padding(self):
        def say(*overrides):
            return describe_derived(derive(compose(["launch.ranks=4", *overrides]).require())).splitlines()

        assert not any(line.startswith("context") for line in say())
        assert say("parallel.cp=4", "batch.context=64")[-1].split(maxsplit=1)[1] == (
            "each of 4 cp ranks has 16 tokens of a sequence (ulysses 1 x ring 4)"
        )
        assert say("parallel.cp=4", "parallel.context=[2,2]", "batch.context=61")[-1].endswith(
            "has 16 tokens of a sequence (ulysses 2 x ring 2), 3 of padding in all: none with batch.context=56 or 64"
        )

    def test_lengths_that_need_no_padding(self):
        assert unpadded_lengths(4096, 1, 4) == (4096,)
        assert unpadded_lengths(4097, 2, 2) == (4096, 4104)
        assert unpadded_lengths(5, 1, 4) == (8,)


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["parallel.ep=2", "launch.ranks=3"], "parallel.ep", "parallel.ep=1 or 3"),
        (["parallel.ep=4", "parallel.tp=2", "launch.ranks=6"], "parallel.ep", "parallel.ep=2 or 3 or 6"),
        (
            ["parallel.ep=4", "parallel.tp=2", "parallel.expert_tp=2", "launch.ranks=4"],
            "parallel.ep",
            "parallel.ep=1 or 2",
        ),
        (
            ["parallel.tp=4", "parallel.expert_tp=2", "launch.ranks=4"],
            "parallel.expert_tp",
            "parallel.expert_tp=1 or 4, or null",
        ),
    ],
)
def test_expert_degrees_that_do_not_fit_are_told_with_those_that_do(overrides, key, fix):
    assert problems_of(*overrides)[key].fix == fix


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["zero.stage=4"], "zero.stage", "from 0 to 3"),
        (["zero.stage=2", "zero.shard_within=3", "launch.ranks=4"], "zero.shard_within", "does not divide the 4 ranks"),
        (["zero.stage=2", "zero.shard_within=rack"], "zero.shard_within", "a whole number of at least 1 or node"),
        (["zero.stage=0", "zero.shard_within=1"], "zero.shard_within", "zero.stage=0 has no use for it"),
        (["zero.stage=0", "zero.optimizer_within=all"], "zero.optimizer_within", "zero.stage=0 has no use for it"),
        (["zero.stage=2", "zero.optimizer_within=all"], "zero.optimizer_within", "leaves no replicas"),
        (["zero.stage=1", "zero.accumulate=local"], "zero.accumulate", "zero.stage=1 has no use for it"),
        (["zero.stage=2", "zero.keep_gathered=true"], "zero.keep_gathered", "zero.stage=2 has no use for it"),
        (["zero.stage=0", "zero.quantize_gather=int8"], "zero.quantize_gather", "zero.stage=0 has no use for it"),
        (["zero.stage=3", "zero.quantize_gather=int4"], "zero.quantize_gather", "none, int8, fp8"),
        (["zero.stage=0", "zero.quantize_reduce=int8"], "zero.quantize_reduce", "zero.stage=0 has no use for it"),
        (["zero.stage=3", "zero.quantize_reduce=int4", "launch.ranks=4"], "zero.quantize_reduce", "are on one node"),
        (["zero.stage=3", "zero.quantize_min_elements=9"], "zero.quantize_min_elements", "quantizes nothing"),
        (
            ["zero.stage=2", "zero.secondary_shard=2", "launch.ranks=4"],
            "zero.secondary_shard",
            "zero.stage=2 has no use",
        ),
        (
            ["zero.stage=3", "zero.secondary_shard=3", "launch.ranks=4"],
            "zero.secondary_shard",
            "is no part of the 4 ranks",
        ),
        (
            ["zero.stage=3", "zero.secondary_shard=4", "launch.ranks=4"],
            "zero.secondary_shard",
            "is no part of the 4 ranks",
        ),
        (
            ["zero.stage=3", "zero.secondary_shard=node", "launch.ranks=4"],
            "zero.secondary_shard",
            "do not leave a node",
        ),
        (
            ["zero.stage=3", "zero.secondary_shard=2", "zero.keep_gathered=true", "launch.ranks=4"],
            "zero.secondary_shard",
            "there is no second time",
        ),
    ],
)
def test_zero_choices_that_cannot_be_are_refused(overrides, key, says):
    problems = problems_of(*overrides)
    assert problems.keys() == {key}
    assert says in problems[key].message


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["memory.activation_checkpointing=some"], "memory.activation_checkpointing", "selective"),
        (["memory.activation_checkpointing=auto"], "memory.activation_checkpointing", "memory.budget_gb, which is not"),
        (["memory.budget_gb=20"], "memory.budget_gb", "met by memory.activation_checkpointing=auto only, not by none"),
        (["memory.kept_operations=[attention]"], "memory.kept_operations", "no operation's output is kept by name"),
        (
            [
                *("memory.activation_checkpointing=selective", "memory.compile=always"),
                *("parallel.tp=2", "parallel.overlap=always", "launch.ranks=2"),
            ],
            "memory.activation_checkpointing",
            "with parallel.overlap=always graphs end at tp's regions",
        ),
    ],
)
def test_checkpointing_that_cannot_be_is_refused(overrides, key, says):
    problems = problems_of(*overrides)
    assert problems.keys() == {key}
    assert says in problems[key].message


ON_DISK = ("memory.offload.optimizer=1", "memory.offload.home=disk", "memory.offload.disk_path=/scratch")


def test_a_second_copy_within_nodes_takes_several_of_them():
    slurm = ("launch=slurm", "launch.nodes=2", "launch.ranks_per_node=4", "zero.stage=3", "zero.secondary_shard=node")
    assert "zero.secondary_shard" not in problems_of(*slurm)
    within = problems_of(*slurm, "zero.shard_within=node")
    assert "do not leave a node" in within["zero.secondary_shard"].message


def test_gradients_are_quantized_between_nodes():
    slurm = ("launch=slurm", "launch.nodes=2", "launch.ranks_per_node=4", "zero.stage=3")
    problems = problems_of(*slurm, "zero.quantize_reduce=int4_rotated", "zero.quantize_min_elements=4096")
    assert not {key for key in problems if key.startswith("zero.")}


def test_masters_on_a_disk_are_not_quantized():
    problems = problems_of(*ON_DISK, "zero.stage=3", "zero.quantize_gather=int8")
    assert "come in pieces" in problems["zero.quantize_gather"].message


def test_states_on_a_disk_leave_the_memory_of_a_host_that_computes_too():
    assert not problems_of(*ON_DISK, "launch.device=cpu")


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["memory.offload.optimizer=1.5"], "memory.offload.optimizer", "from 0 to 1"),
        (["memory.offload.optimizer=0.5", "launch.device=cpu"], "memory.offload.optimizer", "launch.device=cpu"),
        (
            ["memory.offload.parameters=0.5", "launch.device=cpu", "zero.stage=3"],
            "memory.offload.parameters",
            "the host",
        ),
        (["memory.offload.parameters=1", "zero.stage=2"], "memory.offload.parameters", "resident"),
        (["memory.offload.optimizer=1", "memory.offload.home=disk"], "memory.offload.disk_path", "needs a folder"),
        (["memory.offload.home=disk", "memory.offload.disk_path=/scratch"], "memory.offload.home", "no unit's states"),
        (["memory.offload.disk_path=/scratch"], "memory.offload.disk_path", "memory.offload.home is host"),
        ([*ON_DISK, "precision.moments=int8"], "precision.moments", "few bits"),
        ([*ON_DISK, "precision=bf16", "precision.master=none"], "precision.master", "rounded in memory"),
        ([*ON_DISK, "memory.offload.activations=1", "launch.device=cpu"], "memory.offload.activations", "the host"),
        (["memory.offload.activations=-0.5"], "memory.offload.activations", "from 0 to 1"),
        (["memory.offload.activations=1", "launch.device=cpu"], "memory.offload.activations", "the device is the host"),
    ],
)
def test_offloads_that_cannot_be_are_refused(overrides, key, says):
    problems = problems_of(*overrides)
    assert problems.keys() == {key}
    assert says in problems[key].message


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["precision.compute=fp64", "precision.master=fp64"], "precision.reduce", "less precise"),
        (["precision.compute=fp64", "precision.reduce=fp64"], "precision.master", "less precise"),
        (
            ["precision.compute=fp64", "precision.master=fp64", "precision.reduce=bf16"],
            "precision.reduce",
            "less precise",
        ),
        (["precision.reduce=fp64"], "precision.reduce", "summed in the dtype of precision.master=fp32"),
        (["precision.loss_scale=1024"], "precision.loss_scale", "only fp16 loses small gradients"),
        (["precision=bf16", "precision.loss_scale=dynamic"], "precision.loss_scale", "needs no loss scale"),
        (["precision=fp16", "precision.loss_scale=0"], "precision.loss_scale", "must be"),
        (["precision=fp16", "precision.master=none"], "precision.master", "nothing between 0 and 6e-8"),
        (["precision.master=none"], "precision.master", "may be fp32 here"),
        (["precision=fp32", "precision.master=none"], "precision.master", "in fp32 already"),
        (
            ["precision=bf16", "precision.master=none", "precision.reduce=fp64"],
            "precision.reduce",
            "a wider one adds nothing",
        ),
        (["optim.schedule.warmup_steps=300"], "optim.schedule.warmup_steps", "longer than the run of train.steps=250"),
        (["optim/schedule=wsd", "optim.schedule.decay_steps=240"], "optim.schedule.decay_steps", "20 + 240"),
        (["optim.schedule.decay_steps=10"], "optim.schedule.decay_steps", "only wsd"),
        (["optim=sgd", "optim.betas=[0.8,0.9]"], "optim.betas", "sgd has no betas"),
        (["optim=lion", "optim.eps=1e-5"], "optim.eps", "lion has no eps"),
        (["optim.momentum=0.5"], "optim.momentum", "adamw has no momentum"),
        (["optim.betas=[0.9,1.0]"], "optim.betas", "below 1"),
        (["optim=sgd", "optim.momentum=1.0"], "optim.momentum", "below 1"),
        (["optim=lion", "precision.moments=int8"], "precision.moments", "lion updates by a sign"),
        (["optim=sgd", "optim.momentum=0", "precision.moments=bf16"], "precision.moments", "has no moments"),
        (["optim.clip_norm=0"], "optim.clip_norm", "trains nothing"),
        (["train.ema=1.0"], "train.ema", "stays at the first weights"),
        (["optim.clip_update=0"], "optim.clip_update", "trains nothing"),
        (["optim.clip_update=1", "memory.offload.optimizer=1"], "optim.clip_update", "unit after unit"),
        (["optim=sgd", "optim.decay_follows=peak"], "optim.decay_follows", "a part of its gradient"),
        (
            ["optim.decay_follows=peak", "optim.schedule.stop_step=25", "optim.schedule.final_ratio=0"],
            "optim.decay_follows",
            "the rate is 0",
        ),
        (["optim.qk_clip=0"], "optim.qk_clip", "learns nothing"),
        (["optim=muon", "model.mup_base={hidden_size: 64}"], "model.mup_base", "adamw and lion"),
        (["model.freeze=['a(']"], "model.freeze", "not a regular expression"),
        (["optim.groups.head.pattern='['"], "optim.groups.head.pattern", "not a regular expression"),
        (["~data.sources.stdlib"], "data.sources", "nothing to train on"),
        (["data.sources.stdlib.weight=0"], "data.sources.stdlib.weight", "weight 0"),
        (["data.bpe_vocab=null", "model.config.vocab_size=9"], "model.tokenizer", "no tokenizer"),
        (["model.tokenizer=gpt2", "data.bpe_vocab=512"], "data.bpe_vocab", "has a tokenizer already"),
        (["model.weights=gpt2", "data.bpe_vocab=512"], "data.bpe_vocab", "has a tokenizer already"),
        (["train.validate_every_steps=5", "data.validation=0"], "data.validation", "held out"),
        (["checkpoint.every_minutes=0"], "checkpoint.every_minutes", "without end"),
        (["checkpoint.interval=young_daly"], "checkpoint.interval", "needs checkpoint.mtbf_hours"),
        (["checkpoint.interval=young_daly", "checkpoint.mtbf_hours=0"], "checkpoint.interval", "needs checkpoint.mtbf"),
        (["checkpoint.mtbf_hours=8"], "checkpoint.mtbf_hours", "nobody asks for it"),
        (["checkpoint.root='s3:/bucket/runs'"], "checkpoint.root", "would be a folder of that name here"),
        (["checkpoint.root='nope://bucket'"], "checkpoint.root", "knows no protocol"),
        (["checkpoint.root='memory://x'"], "checkpoint.root", "of one process"),
        (["checkpoint.root=' '"], "checkpoint.root", "names no place"),
        (["checkpoint.root='s3://'"], "checkpoint.root", "names no bucket"),
        (["checkpoint.root='simplecache::s3://bucket'"], "checkpoint.root", "chains protocols"),
        (["run.root='s3://bucket/runs'"], "run.root", "is no folder"),
        (["run.root='s3:/bucket/runs'"], "run.root", "is no folder"),
        (["run.root='file:///scratch/runs'"], "run.root", "is no folder"),
        (["run.root=''"], "run.root", "names no folder"),
        (["run.id=a/b"], "run.id", "letters"),
        (["run.id=.hidden"], "run.id", "letters"),
        (["run.name='what ever'"], "run.name", "letters"),
    ],
)
def test_contradictions(overrides, key, says):
    problems = problems_of(*overrides)
    assert problems.keys() == {key}
    assert says in problems[key].message
    assert problems[key].origin != ""


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.schedule.warmup_steps=250"],
        ["optim/schedule=wsd", "optim.schedule.decay_steps=230"],
        ["optim=sgd", "optim.betas=[0.9,0.95]"],
        ["precision=fp64"],
        ["precision.master=fp64", "precision.reduce=fp64"],
        ["precision.master=fp64", "precision.reduce=fp32"],
        ["precision.compute=bf16", "precision.reduce=bf16"],
        ["precision=fp16", "precision.reduce=bf16"],
        ["precision=bf16", "precision.master=none", "precision.reduce=bf16"],
        ["precision=fp16", "precision.loss_scale=1024"],
        ["model=gpt2", "model.weights=gpt2"],
        ["run.id=a.b_c-9"],
        ["checkpoint.root='s3://bucket/runs'"],
        ["checkpoint.root=/scratch/a:/runs"],
        ["run.root=/scratch/a:/runs", "checkpoint.root='gs://other/runs'"],
        ["model.freeze=['^model[.]layers[.][0-3][.]']"],
        ["data.sources.b.path=x", "data.sources.b.weight=0"],
    ],
)
def test_sound_neighbours_of_contradictions(overrides):
    assert problems_of(*overrides) == {}


def test_independent_contradictions_are_all_reported():
    problems = problems_of(
        "precision.compute=fp64", "optim.schedule.warmup_steps=1000", "run.id=a/b", "model.freeze=['[']",
        "batch.sequences_per_step=7", "batch.sequences_per_microbatch=2", "optim.clip_norm=0", "model.tokenizer=x",
        "data.bpe_vocab=512",
    )  # fmt: skip
    assert problems.keys() == {
        "precision.master", "precision.reduce", "optim.schedule.warmup_steps", "run.id", "model.freeze",
        "batch.sequences_per_step", "optim.clip_norm", "data.bpe_vocab",
    }  # fmt: skip


def test_the_fixes_of_a_contradiction_fix_it():
    assert problems_of("optim=sgd", "optim.betas=[0.8,0.9]", "~optim.betas") == {}
    assert problems_of("data.bpe_vocab=null", "model.config.vocab_size=9", "model.tokenizer=gpt2") == {}
    fix = problems_of("run.id='a b/c'")["run.id"].fix
    assert problems_of(fix) == {}


class TestBest:
    def test_nothing_is_the_best_without_a_validation(self):
        key = "checkpoint.keep_best"
        assert "nothing says which is the best" in problems_of(f"{key}=true")[key].message
        assert problems_of(f"{key}=true", "train.validate_every_steps=10") == {}

    def test_a_validation_in_bubbles_is_of_weights_that_are_gone(self):
        words = ("train.validate_every_steps=10", "parallel.pp=2", "launch.ranks=2", "pipeline.fill_bubbles=validation")
        assert list(problems_of("checkpoint.keep_best=true", *words)) == ["checkpoint.keep_best"]


class TestProfile:
    def test_steps_in_their_order_and_ranks_that_are_there(self):
        key = "track.profile_steps"
        assert problems_of(f"{key}=[5,3]")[key].fix == f"{key}=[3,5]"
        assert problems_of(f"{key}=[3,5]", "track.profile_ranks=[0,2]", "launch.ranks=2").keys() == {
            "track.profile_ranks"
        }
        assert problems_of(f"{key}=[3,5]", "track.profile_ranks=[1]", "launch.ranks=2") == {}


def test_keys_without_an_effect_are_refused():
    short = ("train.steps=3", "optim.schedule.warmup_steps=0")
    found = problems_of("track.timeline_step=9", *short, "launch.segment=2", "eval.average=true")
    assert {key: each.fix for key, each in found.items()} == {
        "track.timeline_step": "track.timeline_step=3; or null",
        "launch.segment": "leave it out (~launch.segment); or launch.kind=slurm",
        "eval.average": "train.ema=0.999; or eval.average=false",
    }
    assert problems_of("track.timeline_step=3", *short, "eval.average=true", "train.ema=0.9") == {}


def test_what_experts_drop_is_said_only_where_they_drop():
    assert problems_of("model.expert_drop=position").keys() == {"model.expert_drop"}
    assert problems_of("model.expert_drop=position", "model.expert_capacity=1.5") == {}
    assert problems_of("model.expert_capacity=0.9").keys() == {"model.expert_capacity"}


def test_options_of_what_is_not_sent_are_refused():
    assert problems_of("parallel.expert_overlap=true").keys() == {"parallel.expert_overlap"}
    assert problems_of("parallel.expert_padding=1.5").keys() == {"parallel.expert_padding"}
    deep = ("parallel.ep=8", "launch.ranks=8", "parallel.expert_backend=deepep")
    assert problems_of(*deep) == {}
    codes = problems_of(*deep, "parallel.expert_dispatch=fp8", "parallel.expert_padding=1.5")
    assert codes.keys() == {"parallel.expert_dispatch", "parallel.expert_padding"}
    slices = problems_of(*deep, "parallel.tp=2", "parallel.ep=4", "parallel.expert_tp=2")
    assert slices["parallel.expert_tp"].fix == "parallel.expert_tp=1; or parallel.expert_backend=own"
    assert problems_of("parallel.expert_hierarchical=2").keys() == {"parallel.expert_hierarchical"}
    halves = ("parallel.ep=8", "parallel.expert_overlap=true", "launch.ranks=8")
    assert problems_of(*halves, "batch.sequences_per_microbatch=1").keys() == {"parallel.expert_overlap"}
    assert problems_of(*halves, "batch.sequences_per_microbatch=2") == {}
    compiled = problems_of(*halves, "batch.sequences_per_microbatch=2", "memory.compile=always")
    assert "never" in compiled["parallel.expert_overlap"].fix
    two_hops = problems_of("parallel.ep=8", "parallel.expert_hierarchical=3", "launch.ranks=8")
    assert two_hops["parallel.expert_hierarchical"].fix == "one of 1, 2, 4, 8; node; or null"


class Watched:
    """A recipe, or a group of it, that notes the keys that are read."""

    def __init__(self, group, path: str, seen: set[str]) -> None:
        self.__dict__ |= {"_group": group, "_path": path, "_seen": seen}

    def __getattr__(self, name: str):
        if isinstance(derived := getattr(type(self._group), name, None), property):
            return derived.fget(self)
        value, where = getattr(self._group, name), f"{self._path}.{name}".lstrip(".")
        if is_dataclass(value):
            return Watched(value, where, self._seen)
        if not callable(value):
            self._seen.add(where)
        return value


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["launch=slurm", "launch.ranks=16", "parallel.tp=2", "zero.stage=2", "zero.shard_within=3"],
        ["launch=slurm", "launch.nodes=[1,2]", "launch.ranks=null", "parallel.dp=2", "launch.spares=1"],
        ["parallel.cp=2", "launch.ranks=4", "parallel.context=ulysses", "model.attention=sdpa", "batch.context=3"],
        ["parallel.pp=2", "launch.ranks=2", "pipeline.schedule=dualpipe_v", "pipeline.fill_bubbles=validation"],
        ["parallel.pp=2", "launch.ranks=2", "pipeline.layers=[1]", "pipeline.schedule=interleaved"],
        ["parallel.ep=4", "launch.ranks=4", "parallel.expert_hierarchical=3", "model.experts=eager"],
        ["memory.offload.optimizer=1", "memory.offload.home=disk", "precision.moments=int8", "optim=lion"],
        ["memory.activation_checkpointing=auto", "memory.compile=always", "precision=fp8", "parallel.sequence=false"],
        ["precision=fp64", "precision.master=none", "optim=sgd", "optim.momentum=0", "precision.moments=bf16"],
        ["optim/schedule=wsd", "optim.schedule.decay_steps=9000", "optim.schedule.warmup_steps=9000", "train.epochs=1"],
        ["checkpoint.root=S3://b", "run.root=s3://b", "checkpoint.neighbor_copies=1", "train.on_spike=rewind"],
        ["track.profile_steps=[3,2]", "checkpoint.keep_best=true", "model.family=lama", "model.revision=main"],
        ["data.bpe_vocab=null", "model.tokenizer=null", "train.validate_every_steps=5", "data.validation=0"],
    ],
)  # fmt: skip
def test_a_rule_reads_only_the_keys_that_it_declares(overrides):
    """A rule is silent where a key that it declares is wrong, and asked once for layouts that agree in these."""
    recipe = compose(overrides).draft
    known = set(list_paths())
    for rule in RULES:
        assert all(read in known or any(key.startswith(f"{read}.") for key in known) for read in rule.reads), rule
        seen: set[str] = set()
        if rule.reads and rule.reads != ("cluster",):  # that one asks its dataclass for its fields
            list(rule.find(Watched(recipe, "", seen)))
        assert not {key for key in seen if not any(key == read or key.startswith(f"{read}.") for read in rule.reads)}, (
            rule
        )


def test_every_rule_is_asked() -> None:
    for module in (machines, layout_rules, method_rules, run_rules):
        written = {name: each for name, each in vars(module).items() if isinstance(each, Rule)}
        assert written
        assert [name for name, each in written.items() if each not in RULES] == []
