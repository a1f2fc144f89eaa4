"""Records of conversations as `meshwright prepare --show N` prints them: with what is trained marked."""

from itertools import islice

from framework.data.document import beside_of, encode_answers, encode_conversation, load_chat
from framework.data.prepared import Prepared, locate
from framework.data.records import plan_shards, read_records
from framework.data.source import get_files
from framework.errors import DataError
from framework.output import paint
from framework.recipe.schema import Recipe


def show_record(recipe: Recipe, prepared: Prepared, number: int) -> None:
    """Print record `number`, from 1, of each source of conversations, as it is trained. DataError if there is none."""
    sources = {place.name: place for place in locate(recipe).stores if place.source.conversation is not None}
    if not sources:
        raise DataError(
            "--show: no source has conversations. Set data.sources.NAME.messages to the field that has them, or .pairs"
        )
    for name, place in sources.items():
        if place.files is None:
            raise DataError(f"--show {number}: the files of data.sources.{name} are gone")
        files = get_files(name, place.source, place.files, place.folder.parent)
        field = place.source.conversation
        assert field is not None, "the sources of conversations are shown"
        spans, beside = (span for shard in plan_shards(files) for span in shard), beside_of(field, place.form)
        records = ((span, each) for span in spans for each in read_records(span, field, beside))
        found = next(islice(records, number - 1, None), None)
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
