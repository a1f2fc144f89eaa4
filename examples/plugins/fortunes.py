"""A data reader, `data.sources.X.format=fortunes`: texts between lines of a single %, as the program `fortune` keeps them."""

from framework.extend import reader


@reader("fortunes")
def read_fortunes(path):
    """The texts of a file, in order. A mapping of fields in place of each text works as well."""
    for text in path.read_text(encoding="utf-8").split("\n%\n"):
        yield text.removesuffix("\n%\n")
