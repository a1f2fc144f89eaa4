"""Conversations from any form of record to a token store: the same bytes however it is made, and clear words for what is none."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from framework.commands.generate import generate_command
from framework.commands.inspect import inspect_store
from framework.commands.prepare import prepare_command
from framework.data.chat import Chat
from framework.data.document import read_answers, read_conversation
from framework.data.loader import find_sequence_problems
from framework.data.prepare import describe_rows, prepare
from framework.data.prepared import Prepared, find_prepared
from framework.data.shard import SplitWriter
from framework.errors import DataError
from framework.model.generate import generate
from framework.plan.check import check_layout, most_bytes
from framework.recipe.compose import compose
from framework.recipe.schema import Data, Model, Recipe, Source
from tests.chat_templates import FAMILIES, answer, build_tokenizer, user
from tests.families import build_config
from tests.families import family as find_family
from tests.grid import IN_TURN
from tests.unit.test_data_prepare import read_tree

pytestmark = IN_TURN

TWO = [user("Hi"), answer("Hello, 猫!"), user("More?"), answer("Sure.")]
ADD = [user("Add"), answer("3")]
SYSTEM = {"role": "system", "content": "Be kind."}


def read(record: dict[str, Any], field: str = "messages") -> list[dict[str, Any]]:
    return read_conversation(record, field).messages


@pytest.mark.parametrize(
    ("record", "field", "expected"),
    [
        ({"messages": TWO}, "messages", TWO),
        ({"messages": json.dumps(TWO)}, "messages", TWO),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello, 猫!"}], "system": "Be kind."},
            "conversations",
            [SYSTEM, *TWO[:2]],
        ),
        ({"prompt": "Hi", "completion": "Hello, 猫!"}, "prompt", TWO[:2]),
        ({"prompt": TWO[:1], "completion": TWO[1:2]}, "prompt", TWO[:2]),
        ({"prompt": TWO[:1], "completion": "Hello, 猫!"}, "prompt", TWO[:2]),
        ({"prompt": TWO[:1], "response": "Hello, 猫!"}, "prompt", TWO[:2]),
        ({"prompt": "[x", "response": "{y"}, "prompt", [user("[x"), answer("{y")]),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "instruction", [user("Add\n\n1 2"), answer("3")]),
        ({"instruction": "Add", "input": "", "output": "3", "system": "Be kind."}, "instruction", [SYSTEM, *ADD]),
        ({"instruction": "Add", "output": "3", "history": [["Hi", "Hello, 猫!"]]}, "instruction", [*TWO[:2], *ADD]),
        ({"instruction": "Add", "output": "3", "history": TWO[:2]}, "instruction", [*TWO[:2], *ADD]),
        ({"instruction": "Add", "output": "3", "history": json.dumps([["Hi", "Hello, 猫!"]])}, "instruction", [*TWO[:2], *ADD]),
        ({"instruction": "Add", "output": "3", "history": "[]"}, "instruction", ADD),
        ({"messages": [user("Add"), {"role": "assistant", "content": [{"type": "text", "text": "3"}]}]}, "messages", ADD),
        ({"messages": [{**ADD[0], "name": None}, answer("3", tool_calls=None)]}, "messages", ADD),
        ({"messages": ADD, "completion": "again"}, "messages", ADD),
        ({"instruction": "Add", "response": "", "output": "3"}, "instruction", ADD),
    ],
)  # fmt: skip
def test_every_form_becomes_messages(record: dict[str, Any], field: str, expected: list[dict[str, Any]]) -> None:
    assert read(record, field) == expected


def test_calls_and_thinking_get_the_names_of_templates() -> None:
    called = {"function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    messages = read({"messages": [user("a"), answer(None, tool_calls=[called], thinking="So.")]})
    assert messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    ]
    assert messages[1]["reasoning_content"] == messages[1]["thinking"] == "So."
    from_value = [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]
    observed = {"from": "observation", "value": "3"}
    shared = read({"conversations": [*from_value, observed, {"from": "gpt", "value": "3"}]}, "conversations")
    assert [each["role"] for each in shared] == ["user", "assistant", "tool", "assistant"]
    assert shared[1]["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": []}, "has no messages"),
        ({"messages": 3}, "neither messages nor a prompt but int"),
        ({"messages": ["Hi"]}, "message 1 is not an object but str"),
        ({"messages": [{"content": "Hi"}]}, r"message 1 has no role \(it has: content\)"),
        ({"messages": [user("Hi"), {"role": "robot", "content": "x"}]}, "message 2 has the role 'robot', and known are system"),
        ({"messages": [user("Hi"), {"role": "assistant"}]}, "message 2 has no text but NoneType"),
        ({"messages": [user("Hi"), answer([{"type": "image"}])]}, "message 2 has no text but parts that are no text"),  # type: ignore[arg-type]
        ({"messages": [user("Hi")]}, "no turn of an assistant that is trained"),
        ({"messages": [user("Hi"), answer("x", weight=0)]}, "no turn of an assistant that is trained"),
        ({"messages": [user("Hi"), answer("", tool_calls=[{"x": 1}])]}, "message 2 has a tool call without a function's name"),
        ({"messages": "Hi"}, r"beside it there is no answer \(completion, response, output, answer\)"),
        ({"messages": TWO, "tools": "add"}, "field `tools` is not a list but str"),
        ({"messages": TWO, "chat_template_kwargs": ["x"]}, "field `chat_template_kwargs` is not an object but list"),
        ({"messages": [user("Hi"), answer("x", weight="high")]}, "message 2 has a weight that is no number .*'high'"),
        ({"messages": [user("Hi"), answer("x", thinking={"a": 1})]}, "message 2 has a `thinking` that is no text but dict"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "message 1 has a role that is no text but list"),
        ({"messages": [user("Hi"), answer("\ud800")]}, "its text is not Unicode"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_with_the_message(record: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        read(record)


WRONG = [
    0,
    2.5,
    True,
    [],
    {},
    [KEY := "KEY"],
    [[KEY, KEY]],
    [[KEY, None]],
    {KEY: KEY},
    [{KEY: KEY}],
    "",
    "[]",
    "[0]",
    "\ud800",
    10**400,
    None,
]
FORMS: list[tuple[str, Any, dict[str, Any]]] = [
    ("messages", None, {"messages": [*TWO, user("?"), answer("!", reasoning_content="So.", weight=1)]}),
    ("messages", None, {"messages": [SYSTEM, user([{"type": "text", "text": "y"}]), answer("z")]}),  # type: ignore[arg-type]
    ("messages", None, {"messages": [user("a"), answer("b", tool_calls=[{"function": {"name": "f", "arguments": {"a": "c"}}}])]}),
    ("messages", None, {"messages": ADD, "tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {}}),
    ("talk", None, {"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"}),
    ("prompt", None, {"prompt": "a", "completion": "b"}),
    ("prompt", None, {"prompt": ADD[:1], "completion": ADD[1:]}),
    ("instruction", None, {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"], ["f", "g"]]}),
    ("instruction", None, {"instruction": "a", "output": "c", "history": TWO[:2]}),
    ("chosen", "pair", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ("chosen", "pair", {"chosen": TWO[:2], "rejected": TWO[:1] + ADD[1:]}),
    ("said", "label", {"prompt": "a", "said": "b", "label": True}),
]  # fmt: skip


def put_everywhere(value: Any, wrong: Any) -> Iterator[Any]:
    """The value with something wrong in place of each of its elements, at any depth."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for put in (wrong, *put_everywhere(each, wrong)):
            changed = value.copy()
            changed[key] = put
            yield changed


@pytest.mark.parametrize(("field", "form", "record"), FORMS)
def test_a_value_of_any_other_type_is_refused_or_no_text(field: str, form: Any, record: dict[str, Any]) -> None:
    """Nothing but DataError leaves a reader, and no key, number or name of a type becomes text."""
    chat = Chat(build_tokenizer("chatml"))
    for broken in (each for wrong in WRONG for each in put_everywhere(record, wrong)):
        try:
            if form is None:
                found = [read_conversation(broken, field)]
            else:
                found = [each for each, _ in read_answers(broken, field, form)]
            for each in found:
                chat.encode(each)
        except DataError:
            continue
        texts = re.sub(r'"\w+":', "", json.dumps(broken, ensure_ascii=False))
        for message in (message for each in found for message in each.messages):
            for said in (message["content"], message.get("reasoning_content", "")):
                assert all(f'"{part}"' in texts for part in said.split("\n\n") if part), broken


def test_a_record_that_is_nested_too_deeply_is_a_bad_record(tmp_path: Path) -> None:
    deep = {"messages": ADD, "tools": "[" * 600 + "]" * 600}
    recipe = make_recipe(
        tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", [*make_records(9), deep]), bad_records=1
    )
    assert build(recipe).sources[0].meta.num_bad_records == 1


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def make_records(count: int) -> list[dict[str, Any]]:
    return [{"messages": [user(f"question {n}"), answer(f"answer {n * n}")], "id": n} for n in range(count)]


def make_recipe(
    root: Path, path: Path, tokenizer: Path | None = None, messages: str = "messages", **data: Any
) -> Recipe:
    given = {"chat_template": "chatml", "bpe_vocab": 300} if tokenizer is None else {}
    sources = {"s0": Source(str(path), messages=messages)}
    model = Model(tokenizer=None if tokenizer is None else str(tokenizer))
    return Recipe(model=model, data=Data(**{"sources": sources, "root": str(root), "validation": 0.2, **given, **data}))


def build(recipe: Recipe, workers: int = 1) -> Prepared:
    return prepare(recipe, workers, progress=False)


def read_said(prepared: Prepared) -> list[str]:
    """The trained pieces of all conversations of both splits."""
    chat, said = Chat(AutoTokenizer.from_pretrained(prepared.tokenizer)), []
    for stream in prepared.sources[0].streams.values():
        ends = stream.read_ends()
        for start, stop in zip([0, *ends[:-1]], ends, strict=False):
            trained = stream.read_trained(start, stop)
            assert trained is not None
            said += [text for text, is_trained in chat.read_runs(stream.read(start, stop), trained == 1) if is_trained]
    return said


def test_the_store_trains_every_answer_once(tmp_path: Path) -> None:
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_records(60))))
    assert sorted(read_said(prepared)) == sorted(f"answer {n * n}<|im_end|>" for n in range(60))
    assert inspect_store(prepared.sources[0].folder) == 0
    store = json.loads((prepared.sources[0].folder / "store.json").read_text())
    assert store["source"]["messages"] == "messages"
    assert len(store["source"]["chat_template"]) == 32


def as_csv(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "id"])
        writer.writeheader()
        writer.writerows({**each, "messages": json.dumps(each["messages"])} for each in records)


def as_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)


def as_arrow(path: Path, records: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.csv", as_csv),
        ("a.parquet", as_parquet),
        ("a.arrow", as_arrow),
        ("a.json", lambda path, records: path.write_text(json.dumps(records))),
    ],
)
def test_every_kind_of_file_gives_the_same_conversations(
    name: str, write: Callable[[Path, list[dict[str, Any]]], Any], tmp_path: Path
) -> None:
    records = [*make_records(20), {"messages": [*TWO, {"role": "user", "content": "x", "name": "n"}], "id": 9}]
    write(tmp_path / name, records)
    expected = [f"answer {n * n}<|im_end|>" for n in range(20)] + ["Hello, 猫!<|im_end|>", "Sure.<|im_end|>"]
    assert sorted(read_said(build(make_recipe(tmp_path / "tokens", tmp_path / name)))) == sorted(expected)


def test_workers_and_interruptions_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.data.records.MIN_SHARD_BYTES", 2000)
    monkeypatch.setattr("framework.data.records.TEXT_DOCUMENT_BYTES", 2000)
    path = write_jsonl(tmp_path / "a.jsonl", make_records(120))
    build(make_recipe(tmp_path / "one", path))
    recipe, finish, count = make_recipe(tmp_path / "two", path), SplitWriter.finish, [0]

    def fail(self: SplitWriter) -> Any:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "finish", fail)
        with pytest.raises(KeyboardInterrupt):
            build(recipe)
    build(recipe)
    assert read_tree(tmp_path / "one") == read_tree(tmp_path / "two")


def test_template_and_what_is_trained_make_other_stores(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_records(9))
    (tmp_path / "own.jinja").write_text(FAMILIES["phi4"].template)
    recipes = [
        make_recipe(tmp_path / "tokens", path),
        make_recipe(tmp_path / "tokens", path, train_on="last"),
        make_recipe(tmp_path / "tokens", path, train_on="all"),
        make_recipe(tmp_path / "tokens", path, chat_template=str(tmp_path / "own.jinja")),
    ]
    prepared = [build(each) for each in recipes]
    assert len({each.sources[0].folder for each in prepared}) == 4
    fingerprints = [each.fingerprint for each in prepared]
    assert fingerprints[0] == fingerprints[1]  # one answer in each is all, and the last
    assert len(set(fingerprints)) == 3
    before = find_prepared(recipes[3]).sources[0].folder
    (tmp_path / "own.jinja").write_text(FAMILIES["granite"].template)
    assert build(recipes[3]).sources[0].folder != before


def test_one_flipped_mask_is_found(tmp_path: Path) -> None:
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_records(9))))
    path = prepared.sources[0].folder / "train.trained"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    stream = build(make_recipe(tmp_path / "tokens", tmp_path / "a.jsonl")).sources[0].streams["train"]
    with pytest.raises(DataError, match=r"train.trained: bytes 0 to"):
        stream.read_trained(0, 9)


def test_templates_that_write_turns_anew_give_a_document_for_each(tmp_path: Path) -> None:
    build_tokenizer("qwen3").save_pretrained(tmp_path / "qwen3")
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TWO}, *make_records(3)])
    prepared = build(make_recipe(tmp_path / "tokens", path, tmp_path / "qwen3"))
    assert sum(each.num_documents for each in prepared.sources[0].streams.values()) == 5


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{"messages": TWO}, {"chat": TWO}], r"row 2: field `messages` is missing \(there is: chat\).*the one that has"),
        ([{"messages": TWO}, {"conversations": TWO}], "row 2: .*set data.sources.s0.messages=conversations to train on"),
        ([{"messages": TWO}, {"messages": [{"role": "bot9"}]}], "row 2: message 1 has the role 'bot9'.*bad_records"),
        (
            [{"messages": TWO}, {"messages": [user("a"), answer("b", tool_calls=[{"function": {"name": "f"}}])]}],
            "row 2: message 2 would be trained as 'b<.im_end.>': the chat template leaves out or changes 'f'",
        ),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_with_its_row(records: list[Any], why: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", records))
    with pytest.raises(DataError, match=why):
        build(recipe)
    kept = build(replace(recipe, data=replace(recipe.data, bad_records=1, validation=0.0)))
    assert "row" in (kept.sources[0].folder / "quarantine.jsonl").read_text()
    assert len(read_said(kept)) == 2


def test_a_failing_template_and_a_missing_one_name_the_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [SYSTEM, *TWO]}, *make_records(3)])
    tokenizer = build_tokenizer("gemma2")
    tokenizer.save_pretrained(tmp_path / "gemma2")
    with pytest.raises(
        DataError, match=r"row 1: the chat template fails, and data.chat_template sets another.*System role"
    ):
        build(make_recipe(tmp_path / "tokens", path, tmp_path / "gemma2"))
    (tmp_path / "gemma2" / "chat_template.jinja").unlink()
    with pytest.raises(
        DataError, match=r"has no chat template: Set data.chat_template to a file with one, or to chatml"
    ):
        build(make_recipe(tmp_path / "tokens", path, tmp_path / "gemma2"))
    with pytest.raises(DataError, match=r"data.chat_template=none.jinja: no such file or name. Set data.chat_template"):
        build(make_recipe(tmp_path / "tokens", path, tmp_path / "gemma2", chat_template="none.jinja"))
    assert read_said(build(make_recipe(tmp_path / "tokens", path, tmp_path / "gemma2", chat_template="chatml")))
    (tmp_path / "b.txt").write_text("plain text")
    with pytest.raises(
        DataError, match=r"data.sources.s0.messages=messages, but b.txt is plain text.*data.sources.s0.format"
    ):
        build(make_recipe(tmp_path / "tokens", tmp_path / "b.txt", tmp_path / "gemma2"))


CHAT = [
    "data=files",
    "data.sources.files.path=a.jsonl",
    "data.sources.files.messages=messages",
    "data.chat_template=chatml",
]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([*CHAT, "data.pack=concat"], "data.pack", "would see one another"),
        ([*CHAT, "data.sources.files.field=body"], "data.sources.files.field", "has text or a conversation"),
        ([*CHAT, "data.chat_template=null"], "data.chat_template", "trained on the data has no chat template"),
        ([*CHAT, "data.pack=documents", "data.overlong=refuse"], "data.overlong", "would do nothing"),
        (["data.train_on=last"], "data.train_on", "no source has conversations"),
        (["data.chat_template=chatml"], "data.chat_template", "no source has conversations"),
        (["data.overlong=truncate"], "data.overlong", "no source has conversations"),
    ],
)
def test_keys_that_cannot_work_are_refused(overrides: list[str], key: str, words: str) -> None:
    problems = {each.key: each for each in compose(overrides).problems}
    assert words in problems[key].message
    assert problems[key].fix


def test_packing_follows_from_the_sources() -> None:
    assert compose(CHAT).require().data.packing == "best_fit"
    assert compose([*CHAT, "data.pack=alone"]).require().data.packing == "alone"
    assert compose([]).require().data.packing == "concat"
    assert not compose([]).require().data.isolates


@pytest.mark.parametrize(
    ("experiment", "most_gb"), [("sft_qwen3_0_6b", 80), ("sft_llama3_1_8b", 80), ("dpo_qwen3_8b", 80)]
)
def test_a_shipped_fine_tune_fits_its_gpus(experiment: str, most_gb: int) -> None:
    """Planned from scratch: the config of its weights is on the hub."""
    words = ["data.sources.files.path=x.jsonl", "model.weights=null", "launch.device=cuda", "cluster=h100_ib"]
    recipe = compose([f"experiment={experiment}", *words]).require()
    assert recipe.data.packing == "best_fit"
    assert most_bytes(check_layout(recipe)) < most_gb * 1e9


def test_a_model_whose_documents_see_one_another_is_sent_to_rows_of_one_conversation() -> None:
    config, words = build_config(find_family("bloom")), [*CHAT, "batch.context=16"]
    (problem,) = find_sequence_problems(compose(words).require(), config)
    assert "documents that share a row see one another" in problem.message
    assert problem.fix == "data.pack=alone"
    assert not list(find_sequence_problems(compose([*words, problem.fix]).require(), config))
    # A recurrent mixer's state and its convolution's window end with a document.
    assert not list(find_sequence_problems(compose(words).require(), build_config(find_family("qwen3_next"))))


def test_prepare_shows_what_is_trained_and_what_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [*make_records(4), {"messages": TWO}, {"messages": [user("a"), answer("".join(map(str, range(1000))))]}]
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", records), validation=0.0)
    prepare_command(recipe, workers=1, show=5)
    shown = capsys.readouterr().out
    assert "data.sources.s0, record 5 (a.jsonl)" in shown
    assert "<|im_start|>assistant\n[[Hello, 猫!<|im_end|>]]\n<|im_start|>user\nMore?" in shown
    assert "1 of 6 conversations, longer than batch.context=1024: left out (data.overlong=skip)" in shown
    with pytest.raises(DataError, match=r"--show 9: data.sources.s0 has fewer records"):
        prepare_command(recipe, workers=1, show=9)
    with pytest.raises(DataError, match=r"batch.context=1024: refused"):
        describe_rows(build(recipe), replace(recipe, data=replace(recipe.data, overlong="refuse")))
    # Told before a rank starts, which would find no row.
    with pytest.raises(DataError, match=r"data.sources.s0: each of its conversations is longer than batch.context=2"):
        describe_rows(build(recipe), replace(recipe, batch=replace(recipe.batch, context=2)))


class Parrot:
    """A model that says the ids that it is given."""

    def __init__(self, ids: list[int]) -> None:
        import torch
        from transformers import GenerationConfig

        self.ids, self.device = ids, torch.device("cpu")
        self.generation_config, self.config = GenerationConfig(eos_token_id=None), self

    def get_text_config(self) -> Any:
        return self

    def eval(self) -> Any:
        return self

    def to(self, device: str) -> Any:
        return self

    def generate(self, ids: Any, *, stopping_criteria: Any, max_new_tokens: int, **options: Any) -> Any:
        import torch

        for each in self.ids[:max_new_tokens]:
            ids = torch.cat([ids, torch.tensor([[each]])], dim=1)
            if stopping_criteria and bool(stopping_criteria(ids, None).all()):
                break
        return ids


@pytest.mark.parametrize("name", ["chatml", "glm4_5", "plain"])
def test_an_answer_ends_where_its_turn_ends(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer("olmo2" if name == "plain" else name)
    if name == "plain":
        tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
        tokenizer.chat_template = FAMILIES["chatml"].template
    chat = Chat(tokenizer)
    end = chat.decode(np.array(chat.turn_end))
    model: Any = Parrot(tokenizer(f"I am fine.{end}and more", add_special_tokens=False)["input_ids"])
    assert generate(model, tokenizer, chat.prompt([user("How are you?")]), 50, end=chat.turn_end) == "I am fine."
    monkeypatch.setattr("framework.commands.generate._find_folder", lambda path: path)
    monkeypatch.setattr("framework.model.generate.load_folder", lambda folder: (model, tokenizer))
    generate_command(Path("x"), "How are you?", chat=True, system="Be kind.")
    assert capsys.readouterr().out == "How are you?\nI am fine.\n\n"
    lines = iter(["Hi", "", "More"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    generate_command(Path("x"), None, chat=True)
    assert capsys.readouterr().out == "I am fine.\n\n"
