"""The recipe: the only thing a user writes, as one tree of frozen dataclasses.

Each field carries its meaning and its range in its metadata, which `check`, `--help` and the documentation print.
`Literal` types list the legal values. Derived numbers (accumulation, dp, tokens per step) are never stored: see `derive.py`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from framework.recipe.machine_schema import (
    Cluster,
    ClusterLink,
    ClusterMatmul,
    ClusterMeasured,
    Container,
    Launch,
    Run,
    group,
    key,
)

__all__ = ["Cluster", "ClusterLink", "ClusterMatmul", "ClusterMeasured", "Container", "Launch", "Run"]


@dataclass(frozen=True)
class Train:
    steps: int = key("optimizer steps of the whole run", 1000, low=1)
    epochs: float | None = key(
        "passes over the text of all sources, instead of steps; set into train.steps when the data is prepared",
        None,
        low=1e-6,
    )
    seed: int = key("seeds initialisation, data order and dropout", 1234, low=0)
    validate_every_steps: int | None = key(
        "validate after every so many steps and after the last; null: never", None, low=1
    )
    sample: str | None = key("after the run, export it to RUN/export and continue this text", None)
    on_spike: Literal["log", "skip", "rewind"] = key(
        "where loss or gradient norm lies far above those of the last steps; log: say it; skip: make no update of that step;"
        " rewind: skip, and where spikes persist go back to a checkpoint from before them and leave out the data since",
        "log",
    )
    max_rewinds: int = key("with on_spike=rewind: so many rewinds in a run, then it ends with 88", 5, low=0)
    divergence_check_steps: int | None = key(
        "after every so many steps, and before every save, compare by hashes what ranks hold alike; null: never",
        None,
        low=1,
    )
    validation_sequences: int | None = key("sequences of one validation; null: the whole validation split", None, low=1)


@dataclass(frozen=True)
class Batch:
    sequences_per_step: int | None = key(
        "sequences that one optimizer step consumes (or state tokens_per_step)", None, low=1
    )
    tokens_per_step: int | None = key(
        "tokens that one optimizer step consumes (or state sequences_per_step)", None, low=1
    )
    sequences_per_microbatch: int = key("sequences in one forward pass of one rank", 1, low=1)
    context: int = key("tokens in a sequence", 1024, low=2)


@dataclass(frozen=True)
class Model:
    family: str = key("Hugging Face `model_type`, such as llama, gpt2, mixtral", "llama")
    config: dict[str, Any] = key("values of the Hugging Face config; what is not set keeps the family's default", {})
    config_file: str | None = key(
        "a config.json that transformers wrote, or its folder, in place of model.family; model.config on top. recipe.yaml keeps"
        " what it says",
        None,
    )
    weights: str | None = key("hub name or folder of pretrained weights; null: train from scratch", None)
    revision: str | None = key(
        "commit, branch or tag of hub weights; null: the newest at launch. recipe.yaml keeps the commit", None
    )
    tokenizer: str | None = key(
        "hub name or folder; null: that of `weights`, else trained offline (data.bpe_vocab)", None
    )
    attention: str = key("attention implementation, as Hugging Face names them; auto: its own choice", "auto")
    experts: str = key(
        "implementation of experts that are not dispatched (parallel.ep=1), as Hugging Face names them; auto: its own choice,"
        " eager in fp64",
        "auto",
    )
    expert_capacity: float | None = key(
        "capacity factor: an expert takes at most this many times an even share of each sequence's tokens and drops the rest;"
        " null: no limit",
        None,
        low=1.0,
    )
    expert_drop: Literal["weight", "position"] = key(
        "with model.expert_capacity, which tokens an expert drops: those with the smallest router weights, or the last of the"
        " sequence",
        "weight",
    )
    router_bias_rate: float = key(
        "how far the bias of a router's choice moves after each step, in families that have one, up for experts with less than"
        " the mean load and down for others (DeepSeek-V3: 0.001); 0: it stays",
        0.0,
        low=0.0,
    )
    freeze: list[str] = key("regular expressions over parameter names that are not trained", [])
    tp_plan: dict[str, str] = key(
        "with parallel.tp, roles of modules that are not known: pattern of names -> column, row, replicated or norm", {}
    )


@dataclass(frozen=True)
class Source:
    path: str = key(
        "a file, folder or glob (jsonl, json, csv, parquet, arrow, txt, py ...), a hub dataset, or `python-stdlib`"
    )
    weight: float = key("relative share of the tokens; 0 leaves the source out", 1.0, low=0.0)
    format: Literal["auto", "jsonl", "csv", "tsv", "parquet", "arrow", "text", "hub"] = key(
        "how to read it; auto: by the file's ending", "auto"
    )
    field: str = key("the field of a record that holds the text", "text")


@dataclass(frozen=True)
class Data:
    sources: dict[str, Source] = key("named sources, blended by weight", {})
    root: str = key("folder of the token stores; each store is named by its fingerprint", "tokens")
    bpe_vocab: int | None = key(
        "train a byte-level BPE of this many entries where there is no tokenizer", None, low=260
    )
    bpe_text_bytes: int = key(
        "bytes of text that the BPE is trained on, spread evenly over the sources", 64 << 20, low=1
    )
    pack: Literal["concat", "documents"] = key(
        "concat: documents follow one another and attend across; documents: positions restart and attention stays inside",
        "concat",
    )
    validation: float = key("share of documents held out, chosen by hash", 0.005, low=0.0, high=0.5)
    bad_records: int = key("bad records to quarantine per source before it is an error", 0, low=0)


@dataclass(frozen=True)
class Parallel:
    layout: Literal["stated", "auto"] = key(
        "auto: in place of the degrees below, of pipeline.schedule, zero.stage and the other keys of a layout, of those within 2%"
        " of the fastest that `meshwright search` finds the one with least memory, chosen before the run begins; its recipe.yaml"
        " states it. What the command line sets stays (docs/foresight.md)",
        "stated",
    )
    dp: int | None = key("data-parallel degree; null fills the world", None, low=1)
    tp: int = key("tensor-parallel degree", 1, low=1)
    sequence: bool = key(
        "with tp: between attention and mlp each rank holds a part of every sequence's tokens (sequence parallelism)",
        True,
    )
    overlap: Literal["auto", "never", "always"] = key(
        "with parallel.sequence, send tokens rank by rank under the matrix products of attention and mlp; auto: never,"
        " until it has been measured on GPUs",
        "auto",
    )
    pp: int = key("pipeline-parallel degree", 1, low=1)
    cp: int = key("context-parallel degree: how many ranks divide the tokens of every sequence among them", 1, low=1)
    context: Literal["ring", "ulysses", "gather"] | list[int] = key(
        "with cp, how attention sees other ranks' tokens: ring sends keys and values round, ulysses exchanges tokens for heads,"
        " gather collects all keys and values; [u, r]: u ranks by ulysses within r by ring, u * r = cp",
        "ring",
        low=1,
    )
    ep: int = key("expert-parallel degree: how many ranks divide the experts of a mixture among them", 1, low=1)
    expert_overlap: bool = key(
        "dispatch tokens to experts in two parts, of which one travels while the other is computed", False
    )
    expert_hierarchical: int | Literal["node"] | None = key(
        "send tokens to experts in two hops, first among so many neighbours of ep (node: those of a node), then between such"
        " groups: fewer, larger messages between nodes",
        None,
        low=2,
    )
    expert_tp: int | None = key(
        "ranks that slice each expert: 1, or as many as parallel.tp; null: 1 with ep > 1 (whole experts), else parallel.tp",
        None,
        low=1,
    )


@dataclass(frozen=True)
class Pipeline:
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"] = key(
        "order of forwards and backwards; zb_h1, zbv and dualpipe_v split backwards to fill the bubble", "1f1b"
    )
    virtual_stages: int | None = key("stages on each rank; null: 1, or 2 for interleaved, zbv, dualpipe_v", None, low=1)
    layers: list[int] | None = key("layers of each stage; null: by cost, the embedding's and the head's included", None)
    table: str | None = key("a CSV file with a schedule of your own: one line a rank, cells such as 0F0, 0B0", None)
    fill_bubbles: Literal["none", "validation"] = key(
        "what runs where ranks of a pipeline are idle: validation runs in the step after the one that it is of",
        "none",
    )


@dataclass(frozen=True)
class Zero:
    stage: int = key(
        "shards over the ranks: 1 optimizer state, 2 and gradients, 3 and parameters; 0 nothing", 0, low=0, high=3
    )
    shard_within: int | Literal["node"] | None = key(
        "ranks among which is sharded, with replicas outside (HSDP): a degree, `node`, or null for all", None, low=1
    )
    accumulate: Literal["sharded", "local"] = key(
        "stages 2, 3 over several microbatches: reduce each into the shard, or keep full gradients and reduce once",
        "sharded",
    )
    keep_gathered: bool = key(
        "stage 3: keep gathered parameters until the update, over all microbatches of a step", False
    )
    prefetch_units: int = key("units gathered ahead of the one in use", 1, low=0)
    bucket_bytes: int = key(
        "consecutive small units of together at most so many bytes are gathered, and reduced, in one message; 0: each by itself",
        2**21,
        low=0,
    )
    optimizer_within: Literal["shard", "all"] = key(
        "HSDP: ranks that divide master and optimizer state: those of shard_within, or all, replicas too", "shard"
    )


# Of Llama's form all but queries and the two outputs; what their matmuls need is less than 5% of a step. Names of packed
# projections and of other families' mlps beside them.
KEPT_OPERATIONS = (
    "attention",
    "experts",
    *("k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("c_attn", "c_fc", "query_key_value", "dense_h_to_4h", "qkv_proj", "fc1"),
)


@dataclass(frozen=True)
class Offload:
    optimizer: float = key(
        "fraction of a rank's units whose master and moments live at `home` and are updated by the host",
        0.0,
        low=0.0,
        high=1.0,
    )
    parameters: float = key(
        "with zero.stage=3, fraction of a rank's units whose shards live in the host's memory", 0.0, low=0.0, high=1.0
    )
    activations: float = key(
        "fraction of a stage's layers whose activations lie in the host's memory between forward and backward",
        0.0,
        low=0.0,
        high=1.0,
    )
    home: Literal["host", "disk"] = key(
        "where masters and moments live that are offloaded; disk: in files below disk_path, through a ring of buffers",
        "host",
    )
    disk_path: str | None = key(
        "with home=disk, a folder on a disk of each node; a file per rank, gone with the run", None
    )


@dataclass(frozen=True)
class Memory:
    activation_checkpointing: Literal["none", "selective", "full", "sqrt", "auto"] = key(
        "compute activations again in backward, but for: selective: kept_operations; full: each layer's input; sqrt: that of"
        " every sqrt(layers)-th; auto: by layer, as cheap as budget_gb allows",
        "none",
    )
    kept_operations: list[str] = key(
        "selective: operations whose outputs are kept: attention, experts, and linear layers by their modules' names",
        list(KEPT_OPERATIONS),
    )
    budget_gb: float | None = key("auto: what a rank may be planned to hold, in GB of 2^30 bytes", None, low=0.0)
    compile: Literal["auto", "never", "always"] = key(
        "torch.compile of each layer's forward; auto: never (proved on CPUs, where it does not pay; no GPU has run it)",
        "auto",
    )
    chunked_loss: bool | Literal["auto"] = key(
        "compute head and loss together, in chunks of tokens, so that logits of all tokens never exist; auto: where they are"
        " more than 1% of the device's memory",
        "auto",
    )
    gathered_inputs: Literal["keep", "regather"] = key(
        "with parallel.sequence, the inputs of attention and mlp for backward: keep them whole, or gather them again",
        "keep",
    )
    offload: Offload = group(Offload)


@dataclass(frozen=True)
class Precision:
    compute: Literal["auto", "fp8", "fp16", "bf16", "fp32", "fp64"] = key(
        "forward and backward; auto: bf16 where the device has it, else fp32, decided once by the launcher; fp8: bf16 with the"
        " linear layers' matmuls in fp8 (needs torchao)",
        "auto",
    )
    master: Literal["fp32", "fp64", "none"] = key(
        "the optimizer's weights; gradients are summed in it. none: it updates the weights of precision.compute=bf16 themselves,"
        " with stochastic rounding, and gradients are summed in fp32",
        "fp32",
    )
    reduce: Literal["bf16", "fp32", "fp64"] = key("dtype in which gradients travel between ranks", "fp32")
    moments: Literal["fp32", "bf16", "int8"] = key(
        "what the optimizer's moments are kept in between steps: fp32 (the dtype of precision.master), bf16, or int8 by blocks;"
        " the last two are rounded stochastically where they would stall",
        "fp32",
    )
    fp8_scaling: Literal["tensor", "row"] = key(
        "with precision.compute=fp8, what has a scale of its own: a whole factor of a matmul, or each of its rows and columns",
        "tensor",
    )
    loss_scale: float | Literal["dynamic"] | None = key(
        "with precision.compute=fp16, what the loss is multiplied by before backward; dynamic: halved by a step whose gradient"
        " is not finite, doubled after 2,000 others; null: dynamic",
        None,
        low=2.0**-24,
        high=2.0**40,
    )

    @property
    def is_scale_dynamic(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.compute == "fp16" and not isinstance(self.loss_scale, float)


@dataclass(frozen=True)
class LearningRateSchedule:
    name: Literal["constant", "linear", "cosine", "wsd"] = key("shape after the warm-up", "cosine")
    warmup_steps: int = key("steps of linear warm-up from 0", 0, low=0)
    decay_steps: int | None = key("wsd: steps of the final decay; null: a tenth of train.steps", None, low=1)
    final_ratio: float = key("final learning rate over the peak", 0.1, low=0.0, high=1.0)


@dataclass(frozen=True)
class ParameterGroup:
    pattern: str = key("regular expression searched in parameter names; the first group that matches wins")
    lr_ratio: float = key("learning rate over optim.lr", 1.0, low=0.0)
    weight_decay: float | None = key("null: optim.weight_decay, 0 for norms, biases, A_log, D", None, low=0.0)


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "lion", "sgd"] = key("the optimizer", "adamw")
    lr: float = key("peak learning rate", 3.0e-4, low=0.0)
    betas: tuple[float, float] = key("moments of adamw and lion", (0.9, 0.95), low=0.0, high=1.0)
    eps: float = key("adamw's epsilon", 1.0e-8, low=0.0)
    momentum: float = key("sgd's momentum", 0.9, low=0.0, high=1.0)
    weight_decay: float = key(
        "decoupled decay; not for norms, biases, A_log, D (sgd: added to the gradient)", 0.1, low=0.0
    )
    clip_norm: float | None = key("largest norm of the global gradient; null: no clipping", 1.0, low=0.0)
    groups: dict[str, ParameterGroup] = key("named parameter groups by pattern", {})
    schedule: LearningRateSchedule = group(LearningRateSchedule)


@dataclass(frozen=True)
class Checkpoint:
    root: str | None = key(
        "where checkpoints lie: a folder, or a URL that fsspec knows (s3://bucket/runs, gs://, abfs://, ...); each run has"
        " ROOT/RUN-ID. null: RUN/checkpoints",
        None,
    )
    every_steps: int | None = key("save after every so many steps; null: only at the end and when stopped", None, low=1)
    every_minutes: float | None = key("save after so many minutes; null: never by the clock", None, low=0.0)
    interval: Literal["young_daly"] | None = key(
        "young_daly: in place of every_minutes, as often as loses least, by what saves are measured to cost and mtbf_hours",
        None,
    )
    mtbf_hours: float | None = key(
        "with interval: mean time between failures of the whole run, in hours", None, low=0.0
    )
    mode: Literal["async", "sync"] = key(
        "async: training goes on while a copy in host memory is written; sync: it waits for the disk, and needs no memory",
        "async",
    )
    max_failures: int = key(
        "so many saves in a row that fail end the run; the last one of a run must not fail", 3, low=1
    )
    neighbor_copies: int = key(
        "slurm: on so many other nodes the memory holds what each rank saves, beside its own node's: a restart reads no disk;"
        " 0: none",
        0,
        low=0,
    )
    neighbor_every_steps: int | None = key("with neighbor_copies: after every so many steps", None, low=1)
    keep: int = key("newest checkpoints to keep", 3, low=1)
    keep_every: int | None = key("keep those of steps that are multiples of this as well; null: none", None, low=1)
    export_every_steps: int | None = key(
        "after every so many steps save, and write RUN/exports/step-N behind training: a folder that from_pretrained loads, as"
        " `meshwright export` writes it; all are kept. null: never",
        None,
        low=1,
    )
    keep_best: bool = key(
        "save whenever the validation loss is the lowest so far, and keep that checkpoint beside the newest", False
    )


@dataclass(frozen=True)
class Wandb:
    mode: Literal["auto", "online", "offline", "disabled"] = key("auto: online with a key, else offline", "auto")
    project: str = key("wandb project", "meshwright")
    entity: str | None = key("wandb user or team; null: the key's own", None)
    group: str | None = key("wandb group", None)
    tags: list[str] = key("wandb tags", [])


@dataclass(frozen=True)
class Track:
    every_steps: int = key("report after every so many steps", 1, low=1)
    debug_collectives: bool = key(
        "before each collective ranks tell each other what they start, and after each step they compare what they hold alike:"
        " a divergence is an error, not a hang; slow",
        False,
    )
    timeline_step: int | None = key(
        "write what ranks did when in this step: RUN/timeline.json, a Chrome trace, and timeline.png; null: never",
        None,
        low=1,
    )
    profile_steps: tuple[int, int] | None = key(
        "first and last step that torch's profiler records: RUN/profile has a trace and, of GPUs, the memory's history",
        None,
        low=1,
    )
    profile_ranks: list[int] = key("ranks that record", [0], low=0)
    sample_ledger: bool = key(
        "write which samples each step consumed, with a hash of their tokens: RUN/samples; some 30 bytes a sample",
        False,
    )
    wandb: Wandb = group(Wandb)


@dataclass(frozen=True)
class Recipe:
    """A training run: model, data, method and layout. Composed and checked once, then read by every rank."""

    train: Train = group(Train)
    batch: Batch = group(Batch)
    model: Model = group(Model)
    data: Data = group(Data)
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
