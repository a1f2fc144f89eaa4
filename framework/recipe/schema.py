"""The recipe: the only thing a user writes, as one tree of frozen dataclasses.

Each field carries its meaning and its range in its metadata, which `check`, `--help` and the documentation print.
`Literal` types list the legal values. Derived numbers (accumulation, dp, tokens per step) are never stored: see `derive.py`.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from framework.recipe.machine_schema import (
    Checkpoint,
    Cluster,
    ClusterLink,
    ClusterMatmul,
    ClusterMeasured,
    Container,
    Launch,
    Mlflow,
    Run,
    Track,
    Wandb,
    group,
    key,
)
from framework.recipe.method_schema import Data, LearningRateSchedule, LossSettings, Muon, Optim, ParameterGroup, Source

__all__ = [
    "Checkpoint", "Cluster", "ClusterLink", "ClusterMatmul", "ClusterMeasured", "Container", "Data", "Launch",
    "LearningRateSchedule", "LossSettings", "Mlflow", "Muon", "Optim", "ParameterGroup", "Run", "Source", "Track", "Wandb",
]  # fmt: skip


@dataclass(frozen=True)
class TrainStage:
    until_step: int | None = key("last step of the stage; the last stage ends with train.steps", None, low=1)
    until_share: float | None = key("in place of until_step, the share of train.steps", None, low=0.0, high=1.0)
    until_tokens: int | None = key("in place of until_step, the tokens on which the run has trained then", None, low=1)
    ramp: int | None = key(
        "stages to make of this one, in which numbers that it states of batch, model.config and weights of sources grow evenly;"
        " null: they change at once",
        None,
        low=2,
    )
    data: dict[str, Any] = key("keys of data from this stage on: sources.NAME.weight, pack, overlong, train_on", {})
    batch: dict[str, Any] = key("keys of batch from this stage on", {})
    model: dict[str, Any] = key("keys of model from this stage on: freeze, and config where no shape depends on it", {})
    optim: dict[str, Any] = key("keys of optim from this stage on; a schedule is over the steps of the stage", {})
    memory: dict[str, Any] = key("keys of memory from this stage on", {})


@dataclass(frozen=True)
class Train:
    steps: int = key("optimizer steps of the whole run", 1000, low=1)
    epochs: float | None = key(
        "passes over all text, in place of steps; sets train.steps once data is prepared", None, low=1e-6
    )
    stages: dict[str, TrainStage] = key("named stages of the run, in order; each keeps what it does not change", {})
    seed: int = key("seed of initialisation, data order and dropout", 1234, low=0)
    validate_every_steps: int | None = key("steps between validations; null: no validation", None, low=1)
    sample: str | None = key("after the run, export it to RUN/export and continue this text, or answer it", None)
    on_spike: Literal["log", "skip", "rewind"] = key(
        "on a loss or gradient norm far above the last steps'; log: report it; skip: no update in that step; rewind: skip, and"
        " where spikes persist resume from a checkpoint before them without the data since",
        "log",
    )
    max_rewinds: int = key("with on_spike=rewind: rewinds of a run, after which it ends with 88", 5, low=0)
    divergence_check_steps: int | None = key(
        "steps between checks, by hashes, that replicas are equal; also before each save; null: no check", None, low=1
    )
    z_loss: float = key(
        "weight of (log sum exp logits)^2, averaged over tokens with a loss, which keeps logits near 0 (PaLM: 1e-4)",
        0.0,
        low=0.0,
    )
    router_z_loss: float = key(
        "weight of the same of routers' logits, averaged over the tokens of all mixtures (ST-MoE: 1e-3)", 0.0, low=0.0
    )
    ema: float | None = key(
        "share that an average of the weights keeps in each step, such as 0.999; it is validated beside the weights, and"
        " `export --average` writes it; null: no average",
        None,
        low=0.0,
        high=1.0,
    )
    validation_sequences: int | None = key("sequences of one validation; null: the whole validation split", None, low=1)


@dataclass(frozen=True)
class Batch:
    sequences_per_step: int | None = key("sequences of one optimizer step, or give tokens_per_step", None, low=1)
    tokens_per_step: int | None = key("tokens of one optimizer step, or give sequences_per_step", None, low=1)
    sequences_per_microbatch: int = key("sequences in one forward pass of one rank", 1, low=1)
    context: int = key("tokens in a sequence", 1024, low=2)


# Short names of model.attention for transformers' attention implementations.
STOCK_ATTENTION = MappingProxyType({"flash": "flash_attention_2", "flex": "flex_attention"})


@dataclass(frozen=True)
class Model:
    family: str = key("Hugging Face `model_type`, such as llama, gpt2, mixtral", "llama")
    config: dict[str, Any] = key("values of the Hugging Face config; others keep the family's default", {})
    config_file: str | None = key(
        "a config.json of transformers, or its folder, in place of model.family; model.config changes values of it",
        None,
    )
    weights: str | None = key("hub name or folder of pretrained weights; null: train from scratch", None)
    revision: str | None = key(
        "commit, branch or tag of hub weights; null: the newest commit, kept in recipe.yaml", None
    )
    tokenizer: str | None = key("hub name or folder; null: that of weights, else trained (data.bpe_vocab)", None)
    attention: str = key(
        "auto: Meshwright's attention, which keeps no mask, or transformers' own choice for families that it does not fit;"
        " sdpa, flash, flex, eager or a name of transformers': transformers' own",
        "auto",
    )
    experts: str = key(
        "experts implementation of Hugging Face, with parallel.ep=1; auto: its own choice, eager in fp64", "auto"
    )
    expert_capacity: float | None = key(
        "capacity factor: tokens of a sequence that an expert takes, over an even share; the others are dropped; null: no limit",
        None,
        low=1.0,
    )
    expert_drop: Literal["weight", "position"] = key(
        "tokens that an expert drops: those of the smallest router weights, or the last of the sequence", "weight"
    )
    router_bias_rate: float = key(
        "change of the bias of a router's choice after each step, up for experts with less than the mean load, down for others"
        " (DeepSeek-V3: 0.001); in families that have such a bias",
        0.0,
        low=0.0,
    )
    freeze: list[str] = key("regular expressions over names of parameters that are not trained", [])
    mup_base: dict[str, Any] = key(
        "muP: values of model.config of a narrower base model; optim.lr and initial values are those of the base; {}: no muP",
        {},
    )
    tp_plan: dict[str, str] = key(
        "with parallel.tp, roles of unknown modules: pattern of names -> column, row, replicated or norm", {}
    )


@dataclass(frozen=True)
class Adapter:
    kind: Literal["none", "lora", "dora"] = key(
        "train low-rank weights beside a frozen model (docs/adapters.md); dora: and the length of each row of the sum",
        "none",
    )
    rank: int = key("rank of each pair of low-rank weights", 16, low=1)
    alpha: float = key("scale of the low-rank weights, times their rank", 32.0, low=0.0)
    rank_stabilized: bool = key("scale by alpha / sqrt(rank), not by alpha / rank", False)
    dropout: float = key("share of the low-rank path's inputs that is dropped", 0.0, low=0.0, high=0.99)
    targets: list[str] = key(
        "modules that get one, by the end of their names; all-linear: each linear layer but the head; experts: stacked experts",
        ["all-linear"],
    )
    train: list[str] = key(
        "modules that are trained whole, by the end of their names, such as embed_tokens, lm_head", []
    )
    base: Literal["bf16", "fp8", "nf4"] = key(
        "frozen weights of linear layers and experts: bf16: in precision.compute; others: in blocks of 8 or 4 bits, decoded for"
        " each use",
        "bf16",
    )
    b_lr_ratio: float = key("LoRA+: learning rate of B over that of A", 1.0, low=0.0)
    weights: str | None = key("folder of an adapter in PEFT's format to start from; null: A random, B zero", None)

    @property
    def is_used(self) -> bool:
        return self.kind != "none"

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class Parallel:
    layout: Literal["stated", "auto"] = key(
        "auto: choose the keys of the layout as `meshwright search` does: of those within 2% of the fastest the one with least"
        " memory; keys on the command line stay (docs/foresight.md)",
        "stated",
    )
    dp: int | None = key("data-parallel degree; null fills the world", None, low=1)
    tp: int = key("tensor-parallel degree", 1, low=1)
    sequence: bool = key("with tp: sequence parallelism, which divides tokens between attention and mlp", True)
    overlap: Literal["auto", "never", "always"] = key(
        "with parallel.sequence, communicate under the matmuls of attention and mlp; auto: never, until measured on GPUs",
        "auto",
    )
    pp: int = key("pipeline-parallel degree", 1, low=1)
    cp: int = key("context-parallel degree: ranks that divide the tokens of every sequence", 1, low=1)
    context: Literal["ring", "ulysses", "gather"] | list[int] = key(
        "attention across cp: ring sends keys and values round, ulysses exchanges tokens for heads, gather collects all keys and"
        " values; [u, r]: u ranks by ulysses within r by ring, u * r = cp",
        "ring",
        low=1,
        registry="context method",
    )
    ep: int = key("expert-parallel degree: ranks that divide the experts of a mixture", 1, low=1)
    expert_overlap: bool = key(
        "layers with experts compute a microbatch in halves by turns: rows of one travel under the other", False
    )
    expert_hierarchical: int | Literal["node"] | None = key(
        "ranks of ep among which a token, sent once, is passed on: those of a node, so many neighbours, or null: to each expert",
        "node",
        low=1,
    )
    expert_dispatch: Literal["bf16", "fp8"] = key(
        "how rows travel to experts: bf16: in the compute dtype, fp8: as codes, and between nodes their results' gradients, too",
        "bf16",
    )
    expert_padding: float | None = key(
        "rows in buffers for a rank's experts, over an even share, so that no host waits to count them; null: as many as needed",
        None,
        low=1.0,
    )
    expert_backend: Literal["own", "deepep"] = key(
        "how rows travel to experts: own: all-to-alls, deepep: kernels of DeepEP, installed beside",
        "own",
    )
    expert_tp: int | None = key(
        "ranks that slice each expert: 1 or parallel.tp; null: 1 with ep > 1 (whole experts), else parallel.tp",
        None,
        low=1,
    )


@dataclass(frozen=True)
class Pipeline:
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"] = key(
        "order of forwards and backwards; zb_h1, zbv and dualpipe_v split backwards to fill the bubble",
        "1f1b",
        registry="pipeline schedule",
    )
    virtual_stages: int | None = key("stages on each rank; null: 1, or 2 for interleaved, zbv, dualpipe_v", None, low=1)
    layers: list[int] | str | None = key(
        "layers of each stage; a run that has measured its units (track.timeline_step): the fastest split by its times; null: by"
        " FLOPs, embedding and head included",
        None,
    )
    table: str | None = key("CSV file with a schedule of your own: one line a rank, cells such as 0F0, 0B0", None)
    fill_bubbles: Literal["none", "validation"] = key(
        "work for idle ranks of a pipeline; validation: a validation runs in the step after its own", "none"
    )


@dataclass(frozen=True)
class Zero:
    stage: int = key(
        "what is sharded: 1 optimizer state, 2 also gradients, 3 also parameters; 0 nothing", 0, low=0, high=3
    )
    shard_within: int | Literal["node"] | None = key(
        "ranks that share one set of shards, with replicas outside (HSDP): a degree, `node`, or null for all",
        None,
        low=1,
    )
    accumulate: Literal["sharded", "local"] = key(
        "stages 2, 3: reduce each microbatch into the shard, or keep full gradients and reduce once", "sharded"
    )
    keep_gathered: bool = key("stage 3: keep unsharded parameters over all microbatches of a step", False)
    prefetch_units: int = key("units unsharded ahead of the one in use", 1, low=0)
    optimizer_within: Literal["shard", "all"] = key(
        "HSDP: ranks that divide master and optimizer state: those of shard_within, or all, replicas too", "shard"
    )
    quantize_gather: Literal["none", "int8", "fp8"] = key(
        "codes as which large trained matrices are unsharded, rounded from exact masters once an update, with scales by block",
        "none",
    )
    quantize_reduce: Literal["none", "int8", "int4", "int4_rotated"] = key(
        "codes as which gradients of large matrices are sent where they go between nodes, added in fp32; int4_rotated: of blocks"
        " turned so that an outlier is spread over all of one",
        "none",
    )
    quantize_min_elements: int = key("elements of the smallest matrix that is quantized", 2**16, low=0)
    secondary_shard: int | Literal["node"] | None = key(
        "stage 3: so many neighbours, or the ranks of a node, keep a second copy of all shards, from which backward unshards",
        None,
        low=2,
    )


# In Llama's form all but the queries and the two outputs, whose matmuls take less than 5% of a step; and the names of packed
# projections and of other families' mlps.
KEPT_OPERATIONS = (
    "attention",
    "experts",
    *("k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("c_attn", "c_fc", "query_key_value", "dense_h_to_4h", "qkv_proj", "fc1"),
)


@dataclass(frozen=True)
class Offload:
    optimizer: float = key(
        "fraction of a rank's units whose master and moments live at home, updated by the host", 0.0, low=0.0, high=1.0
    )
    parameters: float = key(
        "with zero.stage=3, fraction of a rank's units whose shards live in the host's memory", 0.0, low=0.0, high=1.0
    )
    activations: float = key(
        "fraction of a stage's layers whose activations wait for backward in the host's memory", 0.0, low=0.0, high=1.0
    )
    home: Literal["host", "disk"] = key(
        "where offloaded masters and moments live; disk: in files below disk_path, through a ring of buffers", "host"
    )
    disk_path: str | None = key(
        "with home=disk, a folder on a disk of each node; a file per rank, gone with the run", None
    )


@dataclass(frozen=True)
class Memory:
    activation_checkpointing: Literal["none", "selective", "full", "sqrt", "auto"] = key(
        "activations that backward recomputes; selective: all but kept_operations; full: all but each layer's input; sqrt: all"
        " but that of every sqrt(layers)-th; auto: by layer, as cheap as budget_gb allows",
        "none",
    )
    kept_operations: list[str] = key(
        "selective: operations whose outputs are kept: attention, experts, and linear layers by their modules' names",
        list(KEPT_OPERATIONS),
    )
    budget_gb: float | None = key("auto: planned memory of a rank, in GB of 2^30 bytes", None, low=0.0)
    compile: Literal["auto", "never", "always"] = key(
        "torch.compile of each layer's forward; auto: on GPUs, not where outputs are kept by name and parallel.overlap=always",
        "auto",
    )
    chunked_loss: bool | Literal["auto"] = key(
        "compute head and loss in chunks of tokens, without logits of all; auto: where those are more than 3% of a GPU's"
        " memory, 1% of a CPU rank's",
        "auto",
    )
    gathered_inputs: Literal["keep", "regather"] = key(
        "with parallel.sequence, gathered inputs of attention and mlp: keep them for backward, or gather them again",
        "keep",
    )
    offload: Offload = group(Offload)


@dataclass(frozen=True)
class Precision:
    compute: Literal["auto", "fp8", "fp16", "bf16", "fp32", "fp64"] = key(
        "forward and backward; auto: bf16 where the device has it, else fp32; fp8: bf16 with the matmuls of linear layers in fp8"
        " (needs torchao)",
        "auto",
    )
    master: Literal["fp32", "fp64", "none"] = key(
        "the optimizer's weights and accumulated gradients; none: it updates the weights of precision.compute=bf16, with"
        " stochastic rounding, and gradients accumulate in fp32",
        "fp32",
    )
    reduce: Literal["bf16", "fp32", "fp64"] = key("dtype in which gradients are sent between ranks", "fp32")
    moments: Literal["fp32", "bf16", "int8"] = key(
        "the optimizer's moments between steps: fp32 (the dtype of precision.master), bf16, or int8 by blocks; the last two are"
        " rounded stochastically where they would stall",
        "fp32",
    )
    fp8_scaling: Literal["tensor", "row"] = key(
        "with fp8, what has a scale: a factor of a matmul, or each of its rows and columns", "tensor"
    )
    loss_scale: float | Literal["dynamic"] | None = key(
        "with fp16, factor of the loss before backward; dynamic, as null: halved by a step whose gradient is not finite, doubled"
        " after 2,000 others",
        None,
        low=2.0**-24,
        high=2.0**40,
    )

    @property
    def is_scale_dynamic(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.compute == "fp16" and not isinstance(self.loss_scale, float)


@dataclass(frozen=True)
class Eval:
    tasks: list[str] = key(
        "files of tasks, folders of them, or names of a plugin's, that are scored during training (docs/evaluation.md)",
        [],
    )
    every_steps: int | Literal["auto"] = key(
        "steps between evaluations, the last step has one anyway; auto: as few as keep evaluations below 1% of the run's FLOPs",
        "auto",
        low=1,
    )
    limit: int | None = key("records of each task, the first ones; null: all", None, low=1)
    average: bool = key("score the average of the weights (train.ema) as well: average/TASK/SCORE", False)


@dataclass(frozen=True)
class Recipe:
    """A training run: model, data, method and layout. Composed and checked once, then read by every rank."""

    train: Train = group(Train)
    batch: Batch = group(Batch)
    model: Model = group(Model)
    adapter: Adapter = group(Adapter)
    loss: LossSettings = group(LossSettings)
    data: Data = group(Data)
    eval: Eval = group(Eval)
    parallel: Parallel = group(Parallel)
    pipeline: Pipeline = group(Pipeline)
    zero: Zero = group(Zero)
    memory: Memory = group(Memory)
    precision: Precision = group(Precision)
    optim: Optim = group(Optim)
    checkpoint: Checkpoint = group(Checkpoint)
    track: Track = group(Track)
    launch: Launch = group(Launch)
    cluster: Cluster = group(Cluster)
    run: Run = group(Run)
    plugins: list[str] = key(
        "packages whose names recipes may use (docs/extend.md); a folder or file by --plugins on the command line alone",
        [],
    )
