"""Every causal language model that Hugging Face knows: does its small copy train, and do its weights go out and in?

Run `python scripts/sweep_families.py [model_type ...]`: one line per model type from its default config, then a count.
  trains   one forward and backward pass on CPU is finite
  weights  `write_weights` gives the files of `save_pretrained`, and `read_weights` returns the state dict from them

With --experts: families with experts only, each through `meshwright verify --fp64` on layouts that divide its experts, 2 to 4
ranks: does every layout train as one process does, or say why it cannot?

With --check, in the dtype that `precision.compute=auto` takes here: whether `check --model` refuses just what ranks refuse that
build small copies and train a step: one line for each layout where the two differ, in brackets what both refuse.

With --layouts NAME ...: each family's small copy in fp64 on two ranks beside stock transformers, three steps: loss, gradients,
norm and weights equal to 1e-9, or why the layout is refused; in those of several documents a row each document equals itself
alone. With --results FILE what was found is kept there, a line each, and not asked again; --table writes FILE's lines as the
table of docs/models.md.

With --context: whether two ranks can divide the sequences of each family, and if so `verify --fp64` with parallel.cp=2. Dropout
is off: with dropout of attention every family is refused.
"""

import argparse
import contextlib
import io
import json
import logging
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from framework.cli import main as meshwright
from framework.errors import MeshwrightError, ModelError, RecipeError
from framework.mesh.layout import Box
from framework.mesh.token_layout import ContextSlices
from framework.model.experts import count_all_experts, find_unknown_experts
from framework.model.shrink import shrink
from framework.model.weights import read_weights, write_weights
from framework.parallel.attention import refuse_undivided_context
from framework.plan.check import lay_out_ranks
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.verify.compare import TOLERANCES
from framework.verify.compare import compare as compare_evidence
from framework.verify.evidence import Evidence
from framework.verify.layout import run_rank
from framework.verify.pool import RankFailed, RankPool
from framework.verify.prepare import VerifyOptions, prepare

# Qwen4's indexer, with a budget that is less than the tokens of a small copy's sequence.
QSA = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
# Keys without which a family's default config has no experts, or experts that two ranks do not divide, or does not build.
COMPLETIONS: dict[str, dict[str, Any]] = {
    # Bidirectional but as decoders, and heads that two ranks divide.
    **{
        name: {"is_decoder": True}
        for name in (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        )
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "bitnet": {"num_key_value_heads": 4},
    "codegen": {"n_head": 32},
    "falcon": {"num_attention_heads": 64, "hidden_size": 4096},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "doge": {"is_moe": True},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 3},
    "flex_olmo": {"num_experts": 8},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen4_exp_text": QSA,
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **QSA}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
}

# By name: what `verify` gets beside the model.
CHECKED_LAYOUTS = {
    "one rank": ["launch.ranks=1"],
    "tp": ["launch.ranks=2", "parallel.tp=2", "parallel.sequence=false"],
    "tp-sequence": ["launch.ranks=2", "parallel.tp=2"],
    "cp": ["launch.ranks=2", "parallel.cp=2"],
    "pp": ["launch.ranks=2", "parallel.pp=2", "batch.sequences_per_step=8"],
    "ep": ["launch.ranks=2", "parallel.ep=2"],
}
EXPERT_LAYOUTS = {
    "ep2": ["launch.ranks=2", "parallel.ep=2", "zero.stage=0"],
    "ep2-zero3": ["launch.ranks=2", "parallel.ep=2", "zero.stage=3"],
    "ep2-tp2": ["launch.ranks=2", "parallel.ep=2", "parallel.tp=2", "parallel.sequence=false"],
    "ep2-tp2-sequence": ["launch.ranks=2", "parallel.ep=2", "parallel.tp=2", "parallel.sequence=true"],
    "ep2-pp2": ["launch.ranks=4", "parallel.ep=2", "parallel.pp=2", "zero.stage=2"],
    "ep2-expert_tp2": ["launch.ranks=4", "parallel.ep=2", "parallel.tp=2", "parallel.expert_tp=2"],
}


# What --layouts runs. tp divides tokens between regions, too, and slices experts, where the family takes it: else FALLBACKS.
TABLE_LAYOUTS = {
    "zero3": ["zero.stage=3"],
    "tp": ["parallel.tp=2"],
    "cp": ["parallel.cp=2"],
    "ulysses": ["parallel.cp=2", "parallel.context=ulysses"],
    "pp": ["parallel.pp=2"],
    "ep": ["parallel.ep=2"],
}
DOCUMENTS = " documents"
TABLE_LAYOUTS |= {
    f"{name}{DOCUMENTS}": [*TABLE_LAYOUTS[name], "data.pack=documents"] for name in ("tp", "cp", "ulysses", "pp")
}
FALLBACKS = ("parallel.sequence=false", "parallel.expert_tp=1", "parallel.expert_tp=1 parallel.sequence=false")
TABLE_MARKS = ("<!-- families: begin -->", "<!-- families: end -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="model_type")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--context", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--layouts", nargs="*", choices=list(TABLE_LAYOUTS), metavar="NAME")
    parser.add_argument("--results", type=Path, default=Path("families.jsonl"))
    parser.add_argument("--table", type=Path, metavar="PAGE", help="the page whose table is written from --results")
    parser.add_argument("--print", action="store_true", help="what verify prints where it is not equal")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    if arguments.table is not None:
        write_table(arguments.results, arguments.table)
        return
    if arguments.layouts is not None:
        families = arguments.model_types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        examine_layouts(families, arguments.layouts or list(TABLE_LAYOUTS), arguments.results)
        return
    counts: Counter[tuple[str, ...]] = Counter()
    pool = RankPool(2, run_rank.__module__)
    for model_type in arguments.model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if arguments.check:
            results = list(examine_check(model_type, pool))
        elif arguments.context:
            results = examine_context(model_type, arguments.print)
        else:
            results = examine_experts(model_type, arguments.print) if arguments.experts else examine(model_type)
        if results:
            counts[tuple(result.split(":")[0] for result in results)] += 1
            print(f"{model_type:24s} {'; '.join(results)}", flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for outcome, number in counts.most_common():
        print(f"{number:4d} {'; '.join(outcome)}")


def build_config(model_type: str) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**COMPLETIONS.get(model_type, {}))


def examine_layouts(families: list[str], layouts: list[str], results: Path) -> None:
    """Add a line to the results for each family and layout that they have none of: family, layout, outcome, date."""
    pool = RankPool(2, run_rank.__module__)
    known = read_results(results)
    for model_type in families:
        missing = [name for name in layouts if name not in known.get(model_type, {})]
        oracles: dict[str, Evidence] = {}
        for name in missing:
            found = examine_layout(model_type, TABLE_LAYOUTS[name], pool, oracles)
            for more in find_fallbacks(found):
                again = examine_layout(model_type, [*TABLE_LAYOUTS[name], *more.split()], pool, oracles)
                if not again.startswith("refused"):
                    found = f"{again}, {more}"
                    break
            with results.open("a") as file:
                file.write(json.dumps([model_type, name, found, time.strftime("%Y-%m-%d")]) + "\n")
            print(f"{model_type:24s} {name:18s} {found[:240]}", flush=True)
    pool.close()


def find_fallbacks(found: str) -> list[str]:
    """Overrides that would do, by what a refusal says."""
    if not found.startswith("refused"):
        return []
    starts = re.findall(r"stages begin at any of \[(\d+)", found)
    layers = [f"pipeline.layers=[{start},{behind}]" for start in starts for behind in (2, 3)]
    return layers + [more for more in FALLBACKS if any(each in found for each in more.split())]


def examine_layout(model_type: str, layout: list[str], pool: RankPool, oracles: dict[str, Evidence]) -> str:
    """equal; refused and why; DIFFERS and where; or FAILED. oracles: evidence of one process, by the batch that it saw."""
    batch = ["data.bpe_vocab=300", "batch.sequences_per_step=4", "batch.sequences_per_microbatch=1", "launch.ranks=2"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        Path(file.name).write_text(json.dumps({"model_type": model_type, **COMPLETIONS.get(model_type, {})}))
        try:
            recipe = compose(["~model", f"model.family={model_type}", *batch, *layout]).require()
            sides = prepare(recipe, VerifyOptions(model_config=Path(file.name), dtype="fp64")).sides
            model = meta(sides.config)
        except Exception as error:
            is_shared = isinstance(error, RecipeError) and "data.pack" in str(error)
            told = describe(error).replace(file.name, f"the default config of {model_type}")
            return f"shared: {told}" if is_shared else f"not built: {told}"
    if "parallel.ep=2" in layout:
        if not count_all_experts(model) and not find_unknown_experts(model):
            return "dense"
        if sides.recipe.parallel.ep == 1 and not find_unknown_experts(model):
            return "not divided: the small copy's experts do not take parallel.ep=2"
    try:
        make_plan(sides.recipe, sides.config)
        key = repr((sides.recipe.batch, sides.recipe.data.isolates))
        if key not in oracles:
            oracles[key] = sides.run_oracle(None)
        # Large small copies (llama4) on a busy machine take minutes.
        ranks = derive(sides.recipe).world
        found = pool.run(ranks, run_rank, sides.recipe, sides.config, sides.num_steps, timeout_s=900)[0]
        worst = max(compare_evidence(found, oracles[key]), key=lambda row: row.error)
        is_equal = worst.error <= TOLERANCES["fp64"]
        return "equal" if is_equal else f"DIFFERS by {worst.error:.0e} in {worst.quantity}, {worst.where}"
    except RankFailed as error:
        told = " ".join(str(error.explanation or error).split())
        return f"refused: {told[:300]}" if error.explanation is not None else f"FAILED: {told[-200:]}"
    except MeshwrightError as error:
        return f"refused: {' '.join(str(error).split())[:300]}"
    except Exception as error:
        return f"FAILED: {describe(error)}"


def read_results(results: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """(outcome, date) by family and layout; the last line of each counts."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        family, layout, outcome, date = json.loads(line)
        found.setdefault(family, {})[layout] = outcome, date
    return found


def write_table(results: Path, page: Path) -> None:
    """Write the table of families and layouts between the marks of a page."""
    found, reasons = read_results(results), dict[str, int]()
    layouts = [name for name in TABLE_LAYOUTS if any(name in row for row in found.values())]
    plain = [name for name in layouts if DOCUMENTS not in name]
    rows = []
    for family in sorted(found):
        cells = [shorten(found[family].get(name, ("not run", ""))[0], reasons) for name in plain]
        rows.append(f"| {family} | {' | '.join([*cells, join_documents(found[family], reasons)])} |")
    counts = [sum(row.get(name, ("",))[0].startswith("equal") for row in found.values()) for name in layouts]
    dates = sorted({date for row in found.values() for _, date in row.values()})
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    equal = ", ".join(f"{name} {number}" for name, number in zip(layouts, counts, strict=True))
    head = [
        f"transformers {transformers.__version__}, {dates[0]} to {dates[-1]}; equal: {equal}",
        "",
        f"| family | {' | '.join([*plain, 'documents'])} |",
        f"|---{'|---' * (len(plain) + 1)}|",
    ]
    before, _, rest = page.read_text().partition(TABLE_MARKS[0])
    behind = rest.partition(TABLE_MARKS[1])[2]
    body = "\n".join([*head, *rows, "", *notes])
    page.write_text(f"{before}{TABLE_MARKS[0]}\n{body}\n{TABLE_MARKS[1]}{behind}")


def join_documents(row: dict[str, tuple[str, str]], reasons: dict[str, int]) -> str:
    """The cell of layouts with several documents in a row: the layouts that are equal; what else there is of those that are equal
    without them."""
    found = {name.removesuffix(DOCUMENTS): outcome for name, (outcome, _) in row.items() if name.endswith(DOCUMENTS)}
    equal = [name for name, outcome in found.items() if outcome.startswith("equal")]
    others = [
        outcome for name, outcome in found.items() if name not in equal and row.get(name, ("equal",))[0] == "equal"
    ]
    others = [each.replace("shared: ", "refused: ", 1) for each in dict.fromkeys(others)]
    cells = [f"equal: {' '.join(equal)}"] * bool(equal) + [shorten(each, reasons) for each in others]
    asked = [name.removesuffix(DOCUMENTS) for name in TABLE_LAYOUTS if name.endswith(DOCUMENTS)]
    is_missing = any(name not in found and row.get(name, ("",))[0].startswith("equal") for name in asked)
    return ", ".join(cells) or ("not run" if is_missing else "as without")


def shorten(outcome: str, reasons: dict[str, int]) -> str:
    """A cell: the outcome, with the number of its reason in place of the words."""
    kind, _, reason = outcome.partition(": ")
    if not reason:
        return outcome
    return f"{kind} ({reasons.setdefault(reason[:200].replace('|', '/'), len(reasons) + 1)})"


def examine_experts(model_type: str, prints: bool) -> list[str]:
    """An outcome for each layout; none where the family has no experts, or cannot be built."""
    try:
        model = meta(shrink(build_config(model_type)))
    except Exception as error:
        has_experts = any("expert" in key for key in CONFIG_MAPPING[model_type]().to_dict())
        return [f"does not build: {describe(error)}"] if has_experts else []
    if not count_all_experts(model) and not find_unknown_experts(model):
        return []
    return [f"{name} {verify(model_type, options, prints)}" for name, options in EXPERT_LAYOUTS.items()]


def examine_context(model_type: str, prints: bool) -> list[str]:
    """Why sequences cannot be divided, else whether two ranks that divide them train as one process does."""
    try:
        # The small copy of a small copy is itself, but for dropout: `shrink` turns it off.
        refuse_undivided_context(shrink(build_config(model_type)), ContextSlices(64, ring=2), has_documents=False)
    except ModelError as error:
        return [f"refused: {describe(error)}"]
    except Exception as error:
        return [f"does not build: {describe(error)}"]
    return [f"divided; cp2 {verify(model_type, ['launch.ranks=2', 'parallel.cp=2'], prints)}"]


def examine_check(model_type: str, pool: RankPool) -> Iterator[str]:
    """Compare what `check --model` and the ranks say of each layout of a small copy."""
    try:
        config = shrink(build_config(model_type))
        config.use_cache = config.get_text_config().use_cache = False
        meta(config)
    except Exception as error:
        yield f"does not build: {describe(error)}"
        return
    small = ["batch.context=16", "batch.sequences_per_step=4", "batch.sequences_per_microbatch=1", "launch.device=cpu"]
    for name, options in CHECKED_LAYOUTS.items():
        recipe = compose(["~model", f"model.family={model_type}", "data.bpe_vocab=300", *small, *options]).require()
        told = answer(lambda recipe=recipe: lay_out_ranks(recipe, config))
        ranks = answer(lambda recipe=recipe: pool.run(derive(recipe).world, run_rank, recipe, config, 1))
        if (told is None) != (ranks is None):
            yield f"{name} DIFFERS: check {told or 'passes'}; ranks {ranks or 'train'}"
        elif told is not None:
            yield f"({name}: {told[:60]})"


def answer(ask: Callable[[], object]) -> str | None:
    """The message of what is raised, None where nothing is."""
    try:
        ask()
    except RankFailed as error:
        return f"{' '.join(str(error).split())[-300:]}"
    except Exception as error:
        return describe(error)
    return None


def verify(model_type: str, options: list[str], prints: bool) -> str:
    printed = io.StringIO()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        Path(file.name).write_text(json.dumps({"model_type": model_type, **COMPLETIONS.get(model_type, {})}))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = meshwright(["verify", "--model-config", file.name, "--fp64", *options])
    told = re.search(r"(?s)(meshwright: |quantity ).*", printed.getvalue()) or [printed.getvalue()]
    if code and prints:
        print(f"{model_type} {' '.join(options)}\n{told[0]}")
    if code == 0 and "parallel.ep 2 -> 1" in printed.getvalue():
        return "not divided: the small copy's experts do not take parallel.ep=2"
    return "ok" if code == 0 else f"exit {code}: {' '.join(told[0].split())[:160]}"


def examine(model_type: str) -> list[str]:
    try:
        full = build_config(model_type)
        meta(full)
    except Exception as error:
        return [f"default config does not build: {describe(error)}"]
    try:
        small = shrink(full)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).train()
    except Exception as error:
        return [f"does not shrink: {describe(error)}"]
    return [check(train, model), check(round_trip, model, small)]


def check(claim: Callable[..., None], *subject: Any) -> str:
    try:
        claim(*subject)
    except Exception as error:
        return f"fails to {claim.__name__}: {describe(error)}"
    return f"{claim.__name__} ok"


def train(model: PreTrainedModel) -> None:
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, 24))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def round_trip(model: PreTrainedModel, config: PretrainedConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        model.save_pretrained(theirs)
        own, units = meta(config), by_layer(model)
        write_weights(ours, own, units, torch.float32)
        compare(load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors"))
        wanted = {name: [Box((0,) * entry.ndim, tuple(entry.shape))] for name, entry in own.state_dict().items()}
        compare({name: tensor for name, _, tensor in read_weights(theirs, own, wanted)}, model.state_dict())


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), f"only one side has {sorted(ours.keys() ^ theirs.keys())[:3]}"
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different[:3]} differ"


def by_layer(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """The state dict in pieces, by the first number in a name."""
    pieces: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        pieces.setdefault(layer, {})[name] = tensor
    return list(pieces.values())


def meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


if __name__ == "__main__":
    main()
