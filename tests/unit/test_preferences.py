# ruff: noqa: E501  (tables of cases)
"""Answers to compare: from any form of record to rows in which both answers of a pair stand, and clear words for what is none."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.data.chat import Message
from framework.data.document import read_answers
from framework.data.loader import Loader
from framework.data.order import count_overlong
from framework.data.pack import Packer
from framework.data.prepare import describe_rows, prepare
from framework.data.prepared import Prepared
from framework.data.store import TokenStream
from framework.errors import DataError
from framework.model.loss import IGNORE
from framework.plan.forecast_plan import forecast_plan
from framework.plan.plan import make_plan
from framework.plan.plan_text import describe_run
from framework.recipe.compose import compose
from framework.recipe.keys import explain_unknown
from framework.recipe.method_schema import NONE, PROBE, UNWANTED, WANTED
from framework.recipe.schema import Adapter, Batch, Data, LossSettings, Model, Recipe, Source
from tests.chat_templates import answer, user
from tests.families import build_config, family
from tests.ranks.parity import small_recipe
from tests.unit.test_conversations import write_jsonl

HI, YES, NO = user("Hi"), answer("Hello!"), answer("Go away.")
EARLIER = [user("One?"), answer("1"), HI]


def read(
    record: dict[str, Any], field: str = "chosen", form: Any = "pair"
) -> list[tuple[list[Message], list[int], int]]:
    return [(each.messages, each.trained, kind) for each, kind in read_answers(record, field, form)]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}, [HI]),
        ({"prompt": [HI], "chosen": [YES], "rejected": [NO]}, [HI]),
        ({"prompt": EARLIER, "chosen": "Hello!", "rejected": [NO]}, EARLIER),
        ({"chosen": [*EARLIER, YES], "rejected": [*EARLIER, NO]}, EARLIER),
        ({"prompt": "Hi", "chosen": [HI, YES], "rejected": [HI, NO]}, [HI]),
        ({"chosen": json.dumps([HI, YES]), "rejected": json.dumps([HI, NO])}, [HI]),
        ({"system": "Be kind.", "prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}, [{"role": "system", "content": "Be kind."}, HI]),
    ],
)  # fmt: skip
def test_every_form_of_a_pair_is_two_conversations(record: dict[str, Any], prompt: list[Message]) -> None:
    (won, of_won, wanted), (lost, of_lost, unwanted) = read(record)
    assert (won, lost) == ([*prompt, YES], [*prompt, NO])
    assert of_won == of_lost == [len(prompt)]
    assert (wanted, unwanted) == (WANTED, UNWANTED)


@pytest.mark.parametrize(("label", "is_wanted"), [(True, True), (0, False), ("True", True), ("0", False)])
def test_an_answer_with_a_label_is_one_conversation(label: object, is_wanted: bool) -> None:
    for record in ({"prompt": "Hi", "completion": "Hello!"}, {"completion": [HI, YES]}):
        assert read({**record, "label": label}, "completion", "label") == [
            ([HI, YES], [1], WANTED if is_wanted else UNWANTED)
        ]


@pytest.mark.parametrize(
    ("record", "form", "why"),
    [
        ({"prompt": "Hi", "chosen": "Hello!"}, "pair", r"field `rejected` is missing \(there is: prompt, chosen\)"),
        ({"chosen": "Hello!", "rejected": "No"}, "pair", "field `prompt` is missing"),
        ({"prompt": "Hi", "chosen": "", "rejected": "No"}, "pair", "field `chosen` is empty"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "No"}, "pair", "field `chosen` is of no messages but int"),
        ({"prompt": "Hi", "chosen": [YES, HI, YES], "rejected": "No"}, "pair", "field `chosen` is not one answer"),
        ({"prompt": "Hi", "chosen": "Hello!"}, "label", "field `label` beside the answer `chosen` is neither true nor false but None"),
        ({"prompt": "Hi", "chosen": "Hello!", "label": "good"}, "label", "is neither true nor false but 'good'"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused_with_the_reason(record: dict[str, Any], form: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        read(record, form=form)


def make_pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}", "chosen": f"yes {n * n}", "rejected": "no" * (n % 3 + 1)} for n in range(count)]


def make_labelled(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}", "completion": f"answer {n * n}", "label": n % 3 == 0} for n in range(count)]


def make_recipe(root: Path, records: list[Any], loss: str = "simpo", **data: Any) -> Recipe:
    field = "completion" if loss == "kto" else "chosen"
    path = write_jsonl(root / f"{loss}.jsonl", records)
    given = {"chat_template": "chatml", "bpe_vocab": 300, "root": str(root / "tokens"), "validation": 0.2}
    settings = LossSettings(loss, reference="x" if loss == "kto" else None)  # type: ignore[arg-type]
    sources = {"s0": Source(str(path), pairs=field)}
    return Recipe(
        model=Model(), loss=settings, data=Data(**{"sources": sources, **given, **data}), batch=Batch(context=200)
    )


def build(recipe: Recipe) -> Prepared:
    return prepare(recipe, 1, progress=False)


def test_documents_of_pairs_lie_side_by_side_in_one_split(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, make_pairs(30))
    prepared = build(recipe)
    streams = prepared.sources[0].streams
    assert sum(each.num_documents for each in streams.values()) == 60
    for stream in streams.values():
        assert stream.is_paired and stream.trained is not None and stream.num_documents  # noqa: PT018
        assert stream.trained[stream.ends - 1].tolist() == [WANTED, UNWANTED] * (stream.num_documents // 2)
    (line,) = describe_rows(prepared, recipe)
    assert f"{streams['train'].num_documents // 2} pairs of answers in" in line
    rows = int(re.findall(r"in (\d+) rows", line)[0])
    (line,) = describe_rows(prepared, recipe, num_tokens=3 * rows * recipe.batch.context)
    assert line.endswith("filled, read 3.0 times")


def test_probes_are_prompts_with_the_answers_of_others(tmp_path: Path) -> None:
    prepared = build(make_recipe(tmp_path, make_labelled(12), "kto", validation=0.0))
    stream = prepared.sources[0].streams["train"]
    assert stream.trained is not None
    documents = np.split(stream.tokens, stream.ends[:-1])
    marks = np.split(stream.trained, stream.ends[:-1])
    kinds = [int(each[-1]) for each in marks]
    assert kinds[1::2] == [PROBE] * 12
    assert sorted(kinds[::2]) == sorted([WANTED, UNWANTED, UNWANTED] * 4)

    def cut(index: int) -> tuple[list[int], list[int]]:
        first = int(np.flatnonzero(marks[index])[0])
        return documents[index][:first].tolist(), documents[index][first:].tolist()

    for number in range(12):
        (asked, said), (asked_again, other) = cut(2 * number), cut(2 * number + 1)
        assert asked == asked_again
        assert said != other
        assert other == cut((2 * number - 2) % 24)[1]


def test_an_answer_without_another_to_compare_with_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        build(make_recipe(tmp_path, make_labelled(1), "kto", validation=0.0))


def make_stream(lengths: list[int]) -> TokenStream:
    rng = np.random.default_rng(3)
    trained = np.concatenate([np.where(np.arange(n) < n // 2, 0, 1 + k % 2) for k, n in enumerate(lengths)])
    tokens = rng.integers(1, 99, size=sum(lengths)).astype(np.uint16)
    return TokenStream(tokens, np.cumsum(lengths), trained=trained.astype(np.uint8), is_paired=True)


def test_both_answers_of_a_pair_stand_in_one_row_apart() -> None:
    lengths = np.random.default_rng(1).integers(2, 14, size=80).tolist()
    stream, context = make_stream(lengths), 25
    stream.reference = np.arange(80) + 0.5
    packer = Packer([stream], context, "best_fit", 0)
    rows = np.arange(packer.sizes[0])
    packed = packer.pack(np.zeros_like(rows), rows)
    pairs = packed.pairs
    assert pairs is not None and pairs.reference is not None and packed.position_ids is not None  # noqa: PT018
    met = pairs.numbers[pairs.kinds != NONE]
    assert sorted(met.tolist()) == list(range(80))
    there = pairs.kinds[:, ::2] != NONE
    assert (pairs.numbers[:, 1::2][there] == pairs.numbers[:, ::2][there] + 1).all()
    assert (pairs.kinds[:, ::2][there] == WANTED).all()
    assert (pairs.kinds[:, 1::2][there] == UNWANTED).all()
    assert (pairs.reference[pairs.kinds != NONE] == met + 0.5).all()
    for row, places in enumerate(pairs.places):
        for place in range(int((pairs.kinds[row] != NONE).sum())):
            number = int(pairs.numbers[row, place])
            start, stop = int(stream.ends[number]) - lengths[number], int(stream.ends[number])
            inside = (places == place) & (packed.labels[row] != IGNORE)
            own = stream.tokens[start + 1 : stop][stream.trained[start + 1 : stop] > 0]  # type: ignore[index]
            assert packed.labels[row][inside].tolist() == own.tolist()


def test_pairs_longer_than_a_row_are_left_out_whole_or_refused() -> None:
    stream = make_stream([5, 5, 9, 4, 3, 10, 2, 2])
    packer = Packer([stream], 10, "best_fit", 0)
    packed = packer.pack(np.zeros(1, np.int64), np.arange(packer.sizes[0]))
    assert packed.pairs is not None
    assert count_overlong(stream, 10) == 2
    assert sorted(packed.pairs.numbers[packed.pairs.kinds != NONE].tolist()) == [0, 1, 6, 7]
    with pytest.raises(DataError, match=r"2 of 4 pairs of answers, longer than batch.context=10"):
        _ = Packer([stream], 10, "best_fit", 0, "refuse").sizes


def test_a_validation_without_a_pair_that_fits_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, make_pairs(30))
    prepared = build(recipe)
    (source,) = prepared.sources
    long = replace(source, streams=source.streams | {"validation": make_stream([300, 300])})
    with pytest.raises(DataError, match=r"all that data.validation=0.2 holds out is longer than batch.context=200"):
        describe_rows(replace(prepared, sources=[long]), recipe)


def test_the_loader_hands_out_pairs_and_their_slices(tmp_path: Path) -> None:
    prepared = build(make_recipe(tmp_path, make_pairs(30)))
    keys: dict[str, Any] = {"seed": 1, "context": 200, "pack": "best_fit", "sequences_per_microbatch": 1}
    with Loader(prepared, num_microbatches=2, **keys) as loader:
        for microbatch in loader.batch(0):
            assert microbatch.pairs is not None
            assert microbatch.pairs.places.shape == microbatch.labels.shape == (1, 200)
            assert int(microbatch.pairs.count()) > 0
            assert microbatch.documents is not None


PAIRS = [
    *("data=files", "data.sources.files.path=a.jsonl", "data.sources.files.pairs=chosen", "data.chat_template=chatml"),
    "data.bpe_vocab=300",
]
DPO = [*PAIRS, "loss=dpo", "loss.reference=x"]


@pytest.mark.parametrize(
    ("overrides", "key", "words", "fix"),
    [
        ([*PAIRS, "loss=dpo"], "loss.reference", "dpo compares with a model that stays as it is", "adapter=lora"),
        ([*PAIRS, "loss=kto", "adapter=lora"], "loss.reference", "kto compares with a model", "loss.reference=base"),
        ([*PAIRS, "loss=dpo", "loss.reference=base"], "loss.reference", "the model is trained whole", "adapter=lora"),
        ([*DPO, "adapter=lora", "loss.reference=base", "adapter.train=[lm_head]"], "loss.reference", "are trained", "adapter.train=[]"),
        (PAIRS, "loss.name", "next_token learns texts", "loss=dpo"),
        ([*DPO, "data.sources.files.pairs=null", "data.sources.files.messages=messages"], "data.sources.files.pairs", "has none to compare", "data.sources.files.pairs=chosen"),
        ([*DPO, "loss.beta=0"], "loss.beta", "has to be above 0", "loss.beta=0.1"),
        ([*DPO, "loss.beta=-1"], "loss.beta", "at least 0", ""),
        ([*DPO, "data.pack=alone"], "data.pack", "stand in one row", "best_fit"),
        ([*DPO, "data.overlong=truncate"], "data.overlong", "compares their beginnings", "skip or refuse"),
        ([*DPO, "data.train_on=all"], "data.train_on", "both answers have a loss", "leave it out"),
        ([*DPO, "loss.margin=1"], "loss.margin", "dpo has no margin", "loss=simpo"),
        ([*PAIRS, "loss=orpo", "loss.reference=x"], "loss.reference", "compares with no other model", "leave it out"),
        (["loss.beta=0.5"], "loss.beta", "compares no answers", "loss=dpo"),
        ([*DPO, "data.sources.files.field=body"], "data.sources.files.field", "answers to compare", "leave one"),
    ],
)  # fmt: skip
def test_keys_that_cannot_work_are_refused(overrides: list[str], key: str, words: str, fix: str) -> None:
    problems = {each.key: each for each in compose(overrides).problems}
    assert words in problems[key].message
    assert fix in problems[key].fix


def test_plan_tells_of_the_forwards_for_a_reference() -> None:
    """A step with a live reference has one forward more, kto's two; a stored one has none."""
    seconds = {}
    for loss in ("next_token", "dpo", "kto", "dpo stored"):
        name, _, stored = loss.partition(" ")
        settings = LossSettings(name, reference=None if name == "next_token" else "R" if stored else "base")  # type: ignore[arg-type]
        recipe = replace(small_recipe("bf16", 1), loss=settings, adapter=Adapter("lora", 3))
        plan = make_plan(recipe, build_config(family("llama")))
        seconds[loss] = forecast_plan(plan).forecast.time.parts["references"]
        told = "\n".join(describe_run(plan))
        assert ("forward of the whole data set" in told) == bool(stored)
    assert seconds["next_token"] == seconds["dpo stored"] == 0.0
    assert seconds["kto"] == pytest.approx(2 * seconds["dpo"])
    assert seconds["dpo"] > 0


def test_recipes_of_preferences_are_recipes() -> None:
    assert compose(DPO).require().loss == LossSettings("dpo", 0.1, reference="x")
    assert compose([*PAIRS, "loss=simpo"]).require().loss.margin == 1.0
    assert replace(compose(DPO).require().loss, name="orpo").is_paired


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("beta", 0.1, "loss.beta"),
        ("loss_type", "sigmoid", "loss.name=dpo"),
        ("rl", "ipo", "loss.name=ipo"),
        ("pref_loss", "orpo", "loss.name=orpo"),
        ("simpo_gamma", 0.5, "loss.margin"),
        ("ref_model", "x", "loss.reference"),
    ],
)
def test_names_of_other_systems_are_translated(name: str, value: Any, ours: str) -> None:
    assert ours in explain_unknown(name, value)
