"""`meshwright prepare`: text to token stores, resumable and on all cores; and a record of conversations as it is trained."""

import argparse
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from framework.commands.arguments import at_least, compose_recipe
from framework.errors import EXIT_DONE, DataError
from framework.host import count_cores
from framework.output import paint
from framework.recipe.schema import Recipe

if TYPE_CHECKING:
    from framework.data.prepared import Prepared, StorePlace
    from framework.data.records import FileSpan, Record


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes (default: one per core)")
    parser.add_argument(
        "--show", type=at_least(1), metavar="N", help="print conversation N, from 1, with what is trained marked"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the token stores of the recipe's data."""
    return prepare_command(compose_recipe(arguments), workers=arguments.workers, show=arguments.show)


def prepare_command(recipe: Recipe, *, workers: int | None = None, show: int | None = None) -> int:
    """Prepare, print a summary and return the exit code (`meshwright prepare`). show: the number of a conversation to print."""
    from framework.data.prepare import describe_rows, prepare

    start = os.times()
    prepared = prepare(recipe, workers)
    stop = os.times()
    wall_s, cpu_s = stop.elapsed - start.elapsed, sum(stop[:4]) - sum(start[:4])  # of children, too
    print(describe(prepared))
    for note in describe_rows(prepared, recipe):
        print(note)
    print(f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU: {cpu_s / max(wall_s, 0.01):.1f} of {count_cores()} cores")
    if show is not None:
        show_record(recipe, prepared, show)
    return EXIT_DONE


def describe(prepared: "Prepared") -> str:
    """A table of each source's size, then the tokenizer, the unigram entropy and the fingerprint."""
    from framework.data.prepare import describe_files

    rows = [f"{'source':16} {'weight':>7} {'split':10} {'documents':>12} {'tokens':>15} {'bad':>6}  store"]
    for source in prepared.sources:
        for split, stream in source.streams.items():
            rows.append(
                f"{source.name:16} {source.weight:7g} {split:10} {stream.num_documents:12,} {stream.num_tokens:15,} "
                f"{source.meta.num_bad_records:6}  {source.folder}"
            )
    rows += describe_files(prepared)
    rows.append(f"tokenizer: {prepared.vocab_size} entries, end of sequence {prepared.eos_id}, {prepared.tokenizer}")
    if prepared.unigram_entropy is not None:
        rows.append(f"unigram entropy of the validation split: {prepared.unigram_entropy:.4f} nats per token")
    rows.append(f"fingerprint: {prepared.fingerprint}")
    return "\n".join(rows)


def show_record(recipe: Recipe, prepared: "Prepared", number: int) -> None:
    """Print record `number`, from 1, of each source of conversations, as it is trained. DataError if there is none."""
    from framework.data.beside import list_read
    from framework.data.document import encode_answers, encode_conversation, load_chat
    from framework.data.prepared import locate
    from framework.data.records import plan_shards

    sources = {place.name: place for place in locate(recipe).stores if place.source.conversation is not None}
    if not sources:
        raise DataError(
            "--show: no source has conversations. Set data.sources.NAME.messages to the field that has them, or .pairs"
        )
    for name, place in sources.items():
        if place.files is None:
            raise DataError(f"--show {number}: the files of data.sources.{name} are gone")
        field = place.source.conversation
        assert field is not None, "the sources of conversations are shown"
        spans = [span for shard in plan_shards(list_read(recipe, place)) for span in shard]
        found = next(islice(read_rows(spans, field, place), number - 1, None), None)
        if found is None:
            raise DataError(f"--show {number}: data.sources.{name} has fewer records on this machine")
        span, record = found
        print(f"data.sources.{name}, record {number} ({span.file.path.name})")
        chat = load_chat(prepared.tokenizer, recipe.data.train_on)
        if place.form is None:
            documents = encode_conversation(record, field, chat)
        else:
            documents = encode_answers(record, field, place.form, chat)
        for count, each in enumerate(documents, start=1):
            assert each.trained is not None, "of a conversation, or an answer"
            which, trained = f"document {count} of {len(documents)}, " * (len(documents) > 1), each.trained > 0
            print(f"{which}{trained.sum():,} of {len(each.ids):,} tokens are trained\n")
            paint(chat.read_runs(each.ids, trained))
            print("\n")


def read_rows(spans: "Iterable[FileSpan]", field: str, place: "StorePlace") -> "Iterator[tuple[FileSpan, Record]]":
    """The records of conversations, each with its span."""
    from framework.data.document import beside_of
    from framework.data.records import read_records
    from framework.data.shard import fetched

    for whole in spans:
        with fetched(whole, place.folder) as span:
            yield from ((span, each) for each in read_records(span, field, beside_of(field, place.form)))
