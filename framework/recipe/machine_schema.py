"""Groups of keys about a run and its machines: its folder, checkpoints and trackers, how ranks are launched, and what a cluster
can do. See `schema.py`."""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal


def key(
    doc: str, default: Any = MISSING, *, low: float | None = None, high: float | None = None, registry: str = ""
) -> Any:
    """A recipe key: its meaning, its default, and its closed range [low, high] if it is a number. registry: the kind of names
    that plugins may add to its words."""
    metadata = {"doc": doc, "low": low, "high": high, "registry": registry}
    if default is MISSING:
        return field(metadata=metadata)
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type) -> Any:
    """A nested group with its own defaults."""
    return field(default_factory=kind)


@dataclass(frozen=True)
class Run:
    root: str = key("folder of the run directories; checkpoint.root may be a URL", "runs")
    id: str | None = key("names the run directory and the wandb run; null: the experiment's name and a number", None)
    name: str = key("first part of a made-up id", "run")
    start_from: str | None = key(
        "RUN or RUN@STEP: a new run with that checkpoint's weights, moments and recipe, changed by the command line; null: none",
        None,
    )
    allow_faults: bool = key("allow `meshwright inject`: for tests, each step then looks for a file", False)


@dataclass(frozen=True)
class Checkpoint:
    root: str | None = key(
        "folder of checkpoints, or a URL that fsspec knows (s3://bucket/runs, gs://, abfs://, ...); each run has ROOT/RUN-ID."
        " null: RUN/checkpoints",
        None,
    )
    every_steps: int | None = key("steps between saves; null: only at the end and when stopped", None, low=1)
    every_minutes: float | None = key("minutes between saves; null: none by the clock", None, low=0.0)
    interval: Literal["young_daly"] | None = key(
        "young_daly: in place of every_minutes, the interval that loses least, by measured costs of saves and mtbf_hours",
        None,
    )
    mtbf_hours: float | None = key(
        "with interval: mean time between failures of the whole run, in hours", None, low=0.0
    )
    mode: Literal["async", "sync"] = key(
        "async: write a copy in host memory during training; sync: training waits for the disk, and needs no memory",
        "async",
    )
    max_failures: int = key("failed saves in a row that end the run; the last save must not fail", 3, low=1)
    neighbor_copies: int = key(
        "slurm: other nodes whose memory holds each rank's save, beside its own node's: a restart then reads no disk",
        0,
        low=0,
    )
    neighbor_every_steps: int | None = key("with neighbor_copies: steps between such saves", None, low=1)
    keep: int = key("newest checkpoints to keep", 3, low=1)
    keep_every: int | None = key("keep also those of steps that are multiples of this; null: none", None, low=1)
    export_every_steps: int | None = key(
        "steps between exports beside training to RUN/exports/step-N, for from_pretrained; all are kept; null: none",
        None,
        low=1,
    )
    keep_best: bool | str = key(
        "save at the lowest validation loss so far, or at the best score of eval.tasks of that name (such as arc_easy/acc), and"
        " keep that checkpoint beside the newest",
        False,
    )


@dataclass(frozen=True)
class Wandb:
    mode: Literal["auto", "online", "offline", "disabled"] = key("auto: online with a key, else offline", "auto")
    project: str = key("wandb project", "meshwright")
    entity: str | None = key("wandb user or team; null: the key's own", None)
    group: str | None = key("wandb group", None)
    tags: list[str] = key("wandb tags", [])


@dataclass(frozen=True)
class Mlflow:
    uri: str | None = key(
        "of MLflow's server or store, such as http://host:5000 or sqlite:///runs.db; null: no MLflow", None
    )
    experiment: str = key("experiment of MLflow", "meshwright")


@dataclass(frozen=True)
class Track:
    every_steps: int = key("steps between reports", 1, low=1)
    debug_collectives: bool = key(
        "compare each collective among its ranks before it starts, and replicas after each step: a divergence is an error, not a"
        " hang; slow",
        False,
    )
    timeline_step: int | None = key(
        "step whose actions are drawn: RUN/timeline.json, a Chrome trace, and timeline.png; and whose units are timed, for"
        " pipeline.layers: RUN/units.json; null: none",
        None,
        low=1,
    )
    profile_steps: tuple[int, int] | None = key(
        "first and last step that torch's profiler records: RUN/profile has a trace, and the history of GPU memory",
        None,
        low=1,
    )
    profile_ranks: list[int] = key("ranks that record", [0], low=0)
    sample_ledger: bool = key(
        "write the samples of each step, with a hash of their tokens, to RUN/samples: some 30 bytes a sample", False
    )
    noise_scale: bool = key("report the gradient noise scale, in tokens, from adamw's moments", False)
    wandb: Wandb = group(Wandb)
    tensorboard: bool = key("write RUN/tensorboard, for TensorBoard", False)
    mlflow: Mlflow = group(Mlflow)
    csv: bool = key("write RUN/metrics.csv", False)
    html: bool = key(
        "write RUN/track.html, a page of the run that a browser shows and reads again while it lasts", False
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers that a run has, by name."""
        wanted = {
            "wandb": self.wandb.mode != "disabled",
            "tensorboard": self.tensorboard,
            "mlflow": self.mlflow.uri is not None,
            "csv": self.csv,
            "html": self.html,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


@dataclass(frozen=True)
class Container:
    kind: Literal["none", "apptainer", "pyxis"] = key("what starts the ranks in a container; pyxis: enroot's", "none")
    image: str | None = key("the image: a .sif or .sqsh file, or a name that the container's tool downloads", None)
    mounts: list[str] = key("more folders to mount, as HOST or HOST:INSIDE; run, data and code are mounted anyway", [])


@dataclass(frozen=True)
class Launch:
    kind: Literal["local", "slurm"] = key("local: on this machine; slurm: `meshwright submit`", "local")
    ranks: int | None = key("processes, one device each; null: as the nodes hold, else as the degrees need", 1, low=1)
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto, decided by the launcher: cuda where this machine has a GPU for each rank, under slurm where launch.gres is set",
        "auto",
    )
    threads_per_rank: int | None = key("CPU threads of a rank; null: the cores divided by the ranks", None, low=1)
    nodes: int | tuple[int, int] | None = key(
        "slurm: nodes; [least, most]: as many as there are, with the same batch; null: as few as hold the ranks",
        None,
        low=1,
    )
    spares: int = key("slurm: nodes of the job that do not train until they take the place of lost ones", 0, low=0)
    ranks_per_node: int = key("slurm: ranks, and so GPUs, of a full node", 8, low=1)
    tp_across_nodes: bool = key("slurm: allow a tensor-parallel group to span nodes; slow", False)
    time: str = key("slurm: time limit of one job, in quotes: '24:00:00', '2-12:00:00'", "24:00:00")
    partition: str | None = key("slurm: partition; null: the cluster's default", None)
    account: str | None = key("slurm: account; null: the user's default", None)
    qos: str | None = key("slurm: quality of service; null: the default", None)
    gres: str | None = key("slurm: name of a GPU, such as gpu or gpu:h100; null: none is asked for", "gpu")
    cpus_per_rank: int | None = key(
        "slurm: CPUs of a rank; null: 8 with a GPU, else the cluster's default", None, low=1
    )
    memory_per_rank_gb: float | None = key("slurm: host memory of a rank, in GB; null: the default", None, low=0.1)
    exclusive: bool = key("slurm: no other job on the nodes", False)
    segment: int | None = key(
        "slurm: nodes of a segment, which lies in one block (NVLink domain) of a block topology; SLURM 23.11 or later",
        None,
        low=1,
    )
    switches: int | str | None = key(
        "slurm: leaf switches of a tree topology at the most, and how long to wait for that: 2, or 2@60 in minutes",
        None,
        low=1,
    )
    sbatch: list[str] = key("slurm: more options of sbatch, such as --constraint=nvlink or --reservation=mine", [])
    set_up: list[str] = key("slurm: shell lines before the ranks start, such as module load cuda", [])
    environment: dict[str, Any] = key(
        "variables of the ranks, such as NCCL_SOCKET_IFNAME; a secret by reference: ${oc.env:HF_TOKEN}", {}
    )
    python: str | None = key("slurm: the ranks' interpreter; null: the one that submits, in a container `python`", None)
    starter: Literal["srun", "torchrun"] = key("slurm: srun starts every rank, or one torchrun per node", "srun")
    container: Container = group(Container)
    signal_seconds_before_end: int = key(
        "slurm: seconds before the time limit at which the run is told to save", 180, low=1
    )
    probe: bool = key(
        "test every node before training: clocks, free space and memory, a shared file, a matmul on each device, all-reduces; a"
        " bad node is left out (docs/reliability.md)",
        True,
    )
    price_per_gpu_hour: float | None = key("price of a rank in an hour, for goodput; null: no costs", None, low=0.0)
    retries: int = key("slurm: restarts of a job's ranks after failures that are not the user's", 10, low=0)
    restarts_without_checkpoint: int = key("slurm: restarts without a newer checkpoint before the run stops", 3, low=0)
    chain: int = key("slurm: jobs queued one after another, to train.steps; 1: the job requeues itself", 1, low=1)
    step_deadline_s: float | Literal["auto"] = key(
        "a longer step counts as hung, and the run ends and names the rank that is behind; auto: at least ten times the median of"
        " the last steps, and 120",
        "auto",
        low=1.0,
    )
    start_deadline_s: float | None = key(
        "the same for each phase before the first step, such as loading; null: 1800, or half of the job's time",
        None,
        low=1.0,
    )
    save_deadline_s: float | None = key("the same for a save; null: 1800, or half of the job's time", None, low=1.0)
    validate_deadline_s: float | None = key("the same for a validation; null: as for a save", None, low=1.0)
    at_once: int | None = key("slurm: runs of a sweep (`submit -m`) at the same time; null: all", None, low=1)


@dataclass(frozen=True)
class ClusterMatmul:
    peak_tflops: float = key("TFLOP/s of a device, dense, by the maker's data sheet", low=1e-6)
    share: float = key("share of the peak that the best matmul reaches", 0.75, low=1e-3, high=1.0)
    measured: list[list[float]] = key(
        "[rows, inner, columns, TFLOP/s] of matmuls on a grid of shapes, which correct the model", []
    )
    gradient: list[list[float]] = key(
        "[features out, tokens, features in, TFLOP/s] of weight gradients added to a main gradient in fp32", []
    )
    attention: list[list[float]] = key(
        "[context, features of a head, TFLOP/s in forward, in backward] on a grid, in place of attention_share", []
    )


@dataclass(frozen=True)
class ClusterLink:
    gb_per_s: list[float] = key("10^9 bytes/s of bus bandwidth, by `nodes`, as nccl-tests states it", low=1e-6)
    nodes: list[int] = key("rising numbers of nodes, to which gb_per_s and hop_us belong", [1], low=1)
    hop_us: list[float] = key("latency of a step of a ring, the slowest among so many nodes", [0.0], low=0.0)
    start_us: float = key("latency of the first step beside that", 0.0, low=0.0)
    measured_mb: float | None = key(
        "10^6 bytes of the tensors of gb_per_s, latencies included; null: gb_per_s is without them", None, low=1e-6
    )
    measured: list[list[float]] = key(
        "[10^6 bytes, microseconds] among all ranks of one node, by rising size, which correct the model", []
    )


@dataclass(frozen=True)
class ClusterMeasured:
    processor: str | None = key("processor of the host; null: the file is by data sheets", None)
    cores: int = key("cores that ranks may use", 1, low=1)
    gpus: list[str] = key("names of its GPUs, as the driver calls them", [])
    torch: str | None = key("version of torch", None)


@dataclass(frozen=True)
class Cluster:
    name: str | None = key(
        "set by cluster=h100_ib, or cluster=PATH.yaml for a file of yours; null: by launch.gres, else h100_ib; for CPUs laptop",
        None,
    )
    device: str = key("device of a rank, by a part of the name that the driver reports", "")
    devices_per_node: int = key("devices of a node", 1, low=1)
    memory_gb: float = key("memory of a device, in GB of 2^30 bytes; of CPUs a rank's part", 1.0, low=1e-3)
    host_memory_gb: float | None = key(
        "host memory of a node, in GB of 2^30 bytes; null: as much as its devices have together", None, low=1e-3
    )
    node_disk_gb: float | None = key("room on a node's own disks, in GB of 2^30 bytes; null: unknown", None, low=1e-3)
    devices_per_domain: int | None = key(
        "devices that NVLink joins, where they are more than a node's; null: the node's. `nodes` of links then counts domains",
        None,
        low=1,
    )
    matmul: dict[str, ClusterMatmul] = key("by dtype: nvfp4, mxfp8, fp8, bf16, fp16, tf32, fp32, fp64", {})
    processors: int = key("tiles of a matmul that a device computes at the same time", 1, low=1)
    tile: tuple[int, int] = key("rows and columns of a matmul that a processor computes at a time", (1, 1), low=1)
    ramp: int = key("start and end of a tile, in columns of a matmul's first factor that take as long", 0, low=0)
    attention: dict[str, list[list[float]]] = key(
        "by kernel: flash1, flash2, flash3, cudnn: [context, features of a head, TFLOP/s in forward, in backward] on a grid",
        {},
    )
    attention_share: float = key("share of the peak that attention reaches in forward", 0.35, low=1e-6, high=1.0)
    attention_backward_share: float = key(
        "share of the peak that attention reaches in backward", 0.35, low=1e-6, high=1.0
    )
    memory_gb_per_s: float = key("10^9 bytes/s of a pass over memory, read and written", 1.0, low=1e-6)
    memory_measured: list[list[float]] = key("[10^6 bytes, 10^9 bytes/s] of passes over tensors of rising size", [])
    softmax_g_per_s: float | None = key("10^9 logits/s of log-softmax; null: as fast as memory", None, low=1e-6)
    overhead_us: float = key("time to launch one kernel", 0.0, low=0.0)
    host_gb_per_s: float = key("10^9 bytes/s between a device and its host's memory, one way", 1.0, low=1e-6)
    disk_gb_per_s: float = key("10^9 bytes/s that a node writes to the checkpoints' storage", 1.0, low=1e-6)
    links: dict[str, ClusterLink] = key("by kind: all_reduce, all_gather, reduce_scatter, all_to_all, send", {})
    price_per_hour: float | None = key("price of a device, in dollars; null: unknown", None, low=0.0)
    device_mtbf_hours: float | None = key(
        "mean hours between failures of a device; null: none expected", None, low=1e-3
    )
    measured: ClusterMeasured = group(ClusterMeasured)
