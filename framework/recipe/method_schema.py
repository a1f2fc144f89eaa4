"""Groups of keys about what is learnt and how: the data, the loss that is minimised on it, and the optimizer. See `schema.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from framework.recipe.machine_schema import group, key

# Kinds of documents in rows of pairs: none; an answer that is wanted, or is not; and of kto, an answer to another prompt.
NONE, WANTED, UNWANTED, PROBE = range(4)
PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "kto")


@dataclass(frozen=True)
class LossSettings:
    name: Literal["next_token", "dpo", "ipo", "orpo", "simpo", "kto"] = key(
        "what is minimised: next_token, or a loss of preferences over data.sources.NAME.pairs (docs/finetuning.md)",
        "next_token",
        registry="loss",
    )
    beta: float = key("of preferences, the scale of rewards; orpo: the weight of its odds ratio", 0.1, low=0.0)
    margin: float = key("simpo: gamma, by how much the reward of the chosen answer is to be larger", 0.5, low=0.0)
    reference: str | None = key(
        "the model that dpo, ipo and kto compare with: a folder of weights, RUN or RUN@STEP, or base, the frozen model under an"
        " adapter",
        None,
    )

    @property
    def is_paired(self) -> bool:
        """Whether it compares answers, of sources of pairs."""
        return self.name in PREFERENCES

    @property
    def needs_reference(self) -> bool:
        return self.name in ("dpo", "ipo", "kto")

    @property
    def extra_forwards(self) -> int:
        """Forwards of a step beside training's: of the frozen model under an adapter, and of kto's answers to other prompts."""
        return (self.reference == "base") + (self.name == "kto")


@dataclass(frozen=True)
class Source:
    path: str = key(
        "file, folder or glob (jsonl, json, csv, parquet, arrow, tar, txt, py ...), hub dataset, `python-stdlib` or `python-help`"
    )
    weight: float = key("relative share of the tokens; 0 leaves the source out", 1.0, low=0.0)
    epochs: float | None = key(
        "in place of weight, passes over the source for each of train.epochs: all sources have it, or none",
        None,
        low=1e-3,
    )
    format: Literal[
        "auto", "jsonl", "csv", "tsv", "parquet", "arrow", "tar", "text", "hub", "megatron", "datatrove", "mds", "ids"
    ] = key(
        "format of the file; auto: by its ending. Of token ids, read where they lie: megatron (.bin and .idx), datatrove (.ds),"
        " mds, and ids: parquet or arrow with lists in field",
        "auto",
        registry="reader",
    )
    field: str = key("the field of a record that holds the text", "text")
    messages: str | None = key(
        "in place of field, the field of a record that holds a conversation, or its prompt or instruction", None
    )
    pairs: str | None = key(
        "in place of field, the field with the preferred answer, beside prompt and rejected; for loss=kto with an answer, beside"
        " prompt and label",
        None,
    )

    @property
    def is_imported(self) -> bool:
        """Whether it has token ids, which are read where they lie."""
        return self.format in ("megatron", "datatrove", "mds", "ids")

    @property
    def conversation(self) -> str | None:
        """The field that is rendered by a chat template, if there is one."""
        return self.messages or self.pairs


@dataclass(frozen=True)
class Data:
    sources: dict[str, Source] = key("named sources, blended by weight", {})
    temperature: float | None = key(
        "multiply each weight by tokens^(1/temperature): 1 is in proportion to size, larger ones lift small sources; null:"
        " weights alone",
        None,
        low=1.0,
    )
    mode: Literal["prepared", "stream"] = key(
        "prepared: all is tokenized before training; stream: only the beginning, and the rest beside the run",
        "prepared",
    )
    root: str = key(
        "folder of the token stores, or the URL of one in an object store (s3://bucket/path); each store is named by its"
        " fingerprint",
        "tokens",
    )
    cache_gb: float = key("with a URL as root, GiB of each node's disk for blocks of tokens", 8.0, low=0.001)
    bpe_vocab: int | None = key("entries of a byte-level BPE to train where there is no tokenizer", None, low=260)
    bpe_text_bytes: int = key(
        "bytes of text that the BPE is trained on, spread evenly over the sources", 64 << 20, low=1
    )
    chat_template: str | None = key(
        "of conversations: a file with a template, one of the tokenizer's by name, or chatml; null: the tokenizer's own",
        None,
    )
    train_on: Literal["assistant", "last", "all"] = key(
        "of conversations, what has a loss: all turns of the assistant with their ends, its last one, or everything",
        "assistant",
    )
    pack: Literal["auto", "concat", "documents", "best_fit", "alone"] = key(
        "concat: documents attend across their borders; documents: positions restart and attention stays inside; best_fit: the"
        " same with rows of whole documents; alone: a row for each, padded; auto: best_fit with conversations, else concat",
        "auto",
    )
    overlong: Literal["skip", "truncate", "refuse"] = key(
        "conversations longer than batch.context, with best_fit or alone: leave them out, cut their ends off, or refuse to train",
        "skip",
    )
    validation: float = key("share of documents held out, chosen by hash", 0.005, low=0.0, high=0.5)
    bad_records: int = key("bad records of a source that are quarantined before it is an error", 0, low=0)

    @property
    def read(self) -> dict[str, Source]:
        """The sources that are read, by name: those of a weight above 0."""
        return {name: source for name, source in self.sources.items() if source.weight}

    def weigh(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """The shares of the sources that are read, from the number of tokens of each, to six digits."""
        power = 0.0 if self.temperature is None else 1 / self.temperature
        exact = {
            name: source.weight * tokens[name] ** power if source.epochs is None else source.epochs * tokens[name]
            for name, source in self.read.items()
        }
        return {name: float(f"{weight:.6g}") for name, weight in exact.items()} if self.blends_by_tokens else exact

    @property
    def blends_by_tokens(self) -> bool:
        """Whether shares depend on the sizes of sources."""
        return self.temperature is not None or any(source.epochs is not None for source in self.read.values())

    @property
    def has_conversations(self) -> bool:
        """Whether a source that is read has conversations, or pairs of them."""
        return any(source.conversation is not None for source in self.read.values())

    @property
    def packing(self) -> Literal["concat", "documents", "best_fit", "alone"]:
        """The way in which rows are packed: `pack`, with the choice of `auto` made."""
        return self.pack if self.pack != "auto" else "best_fit" if self.has_conversations else "concat"

    @property
    def isolates(self) -> bool:
        """Whether documents of a row are kept apart."""
        return self.packing in ("documents", "best_fit")


@dataclass(frozen=True)
class LearningRateSchedule:
    name: Literal["constant", "linear", "cosine", "wsd"] = key("shape after the warm-up", "cosine", registry="schedule")
    warmup_steps: int = key("steps of linear warm-up from 0", 0, low=0)
    decay_steps: int | None = key("wsd: steps of the final decay; null: a tenth of the schedule", None, low=1)
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = key(
        "wsd: shape of the final decay; sqrt: 1 - sqrt of its share that is done", "linear"
    )
    final_ratio: float = key("final learning rate over the peak", 0.1, low=0.0, high=1.0)
    start_step: int = key("steps before the schedule begins, with its warm-up", 0, low=0)
    stop_step: int | None = key("step with which the schedule ends; null: train.steps", None, low=1)


@dataclass(frozen=True)
class ParameterGroup:
    pattern: str = key("regular expression searched in parameter names; the first group that matches wins")
    lr_ratio: float = key("learning rate over optim.lr", 1.0, low=0.0)
    weight_decay: float | None = key("null: optim.weight_decay, 0 for norms, biases, A_log, D", None, low=0.0)
    optimizer: Literal["auto", "muon", "adamw"] = key(
        "of optim.name=muon; auto: muon for matrices of layers, adamw for the rest", "auto"
    )


@dataclass(frozen=True)
class Muon:
    steps: int = key("Newton-Schulz iterations of an update", 5, low=1)
    dtype: Literal["bf16", "master"] = key(
        "dtype of the iterations, and of matrices on their way to and from owners", "bf16"
    )
    scale: Literal["adamw", "original"] = key(
        "adamw: 0.2 sqrt(max(rows, columns)), so that adamw's learning rates carry over; original: sqrt(max(1, rows / columns))",
        "adamw",
    )
    heads: bool = key("an attention's projections are matrices of each head, not of all heads together", False)


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "lion", "sgd", "muon"] = key(
        "the optimizer; muon: of matrices of layers, adamw for the rest", "adamw", registry="optimizer"
    )
    lr: float = key("peak learning rate", 3.0e-4, low=0.0)
    betas: tuple[float, float] = key("moments of adamw and lion", (0.9, 0.95), low=0.0, high=1.0)
    eps: float = key("adamw's epsilon", 1.0e-8, low=0.0)
    momentum: float = key("momentum of sgd and muon", 0.9, low=0.0, high=1.0)
    muon: Muon = group(Muon)
    weight_decay: float = key(
        "decoupled decay; not of norms, biases, A_log, D (sgd: added to the gradient)", 0.1, low=0.0
    )
    decay_follows: Literal["schedule", "peak"] = key(
        "learning rate that decay is multiplied by; schedule: that of the step; peak: optim.lr in every step",
        "schedule",
    )
    qk_clip: float | None = key(
        "largest attention logit: a head that has had a larger one in a step has its projections of queries and keys scaled down"
        " after the update (Kimi K2: 100); null: no clipping",
        None,
        low=0.0,
    )
    clip_update: float | None = key(
        "largest root mean square of a parameter's update over its learning rate, decay apart (AdamW's are mostly below 1); null:"
        " no clipping",
        None,
        low=0.0,
    )
    clip_norm: float | None = key("largest norm of the global gradient; null: no clipping", 1.0, low=0.0)
    groups: dict[str, ParameterGroup] = key("named parameter groups by pattern", {})
    schedule: LearningRateSchedule = group(LearningRateSchedule)
