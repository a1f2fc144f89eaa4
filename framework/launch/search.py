"""`meshwright search`: all layouts of a recipe on its ranks, the best first; written as a file, and tried."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import RecipeError
from framework.recipe.layout_file import write_layout
from framework.recipe.layout_pins import change_pins, compose_open, find_pins
from framework.recipe.schema import Recipe


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. overrides, recipe_dirs: of the recipe; pinned: keys of its layout that stay."""

    recipe: Recipe
    pinned: frozenset[str]
    overrides: Sequence[str]
    recipe_dirs: Sequence[Path]
    options: argparse.Namespace


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Those of the command. What the command line sets of a layout stays, so that it needs no option."""
    parser.add_argument("--by", choices=["time", "cost", "memory"], default="time", help="what ranks (default: time)")
    parser.add_argument("--best", type=int, default=10, metavar="N", help="show so many layouts (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, every layout with its keys")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the best one's keys; layout=FILE then sets them"
    )
    parser.add_argument("--rejections", action="store_true", help="and why each layout is refused, a line each")
    parser.add_argument(
        "--free",
        action="append",
        default=[],
        metavar="KEY",
        help="search over what the command line has set too, such as zero.stage or zero; repeatable",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="keep what the recipe says too, such as memory or parallel.cp; repeatable",
    )
    parser.add_argument(
        "--try",
        dest="try_best",
        type=int,
        metavar="N",
        help="train the best N for some steps each, here or as a SLURM array, correct the cluster's rates by what was"
        " measured, and rank again",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page to look at in a browser: one file; some seconds more"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write its charts as a picture")
    parser.add_argument("--try-steps", type=int, default=10, metavar="S", help="steps of each of them (default: 10)")
    parser.add_argument(
        "--tried", type=Path, metavar="FOLDER", help="read what an array of --try has measured, correct and rank again"
    )


def ask(arguments: argparse.Namespace) -> Asked:
    """What the command line asks for. RecipeError with all that is wrong with it."""
    for name, least in (("best", 1), ("try_best", 1), ("try_steps", 3)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise RecipeError(f"--{name.replace('_best', '').replace('_', '-')} {value}: at least {least}")
    if arguments.write is not None:
        _refuse_file(arguments.write)
    composition = compose_open(arguments.overrides, arguments.recipes)
    pinned = change_pins(find_pins(composition, arguments.overrides, arguments.recipes), arguments.free, arguments.keep)
    return Asked(composition.require(), pinned, arguments.overrides, arguments.recipes, arguments)


def show(asked: Asked, cluster: Any = None) -> Any:
    """Search on a cluster, the recipe's where none is given, and print. Returns what was found."""
    from framework.foresight.find import Question, best_of, cluster_name, search, values_for
    from framework.foresight.page_html import require_pages
    from framework.foresight.page_png import write_pages
    from framework.foresight.search_text import comment_of, describe_rejections, describe_search, to_json

    options = asked.options
    require_pages(options.html, options.png)
    result = search(Question(asked.recipe, asked.pinned, options.by, max(options.best, options.try_best or 0), cluster))
    best = best_of(result)
    name = cluster.name if cluster else cluster_name(asked.recipe)
    if options.json:
        values = [values_for(each, asked.recipe, asked.pinned) for each in result.ranked]
        print(json.dumps(to_json(result, name, asked.pinned, values, options.rejections)))
    else:
        print("\n".join(describe_search(result, name, asked.pinned, options.best)))
    if options.rejections and not options.json:
        print("\n".join(["", *describe_rejections(result)]))
    if options.write is not None:
        write_best(options.write, values_for(best, asked.recipe, asked.pinned), comment_of(best, name, asked.recipe))
        if not options.json:
            print(f"\nwrote {options.write}: meshwright plan layout={options.write} ...")
    if options.html is not None or options.png is not None:
        from framework.foresight.page_of_search import explore, make_search_page

        page = make_search_page(*explore(Question(asked.recipe, asked.pinned, options.by, cluster=cluster)))
        for path in write_pages(page, options.html, options.png):
            print(f"wrote {path}", file=sys.stderr if options.json else sys.stdout)
    return result


def _refuse_file(file: Path) -> None:
    """Raises RecipeError where a layout cannot be written, or something else would be lost: before anything is searched."""
    if not file.parent.is_dir():
        raise RecipeError(f"--write {file}: there is no folder {file.parent}, make it first")
    if file.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--write {file}: end the name in .yaml, so that layout={file} reads it")
    if file.exists() and "layout=THIS_FILE" not in file.read_text(encoding="utf-8", errors="replace"):
        raise RecipeError(f"--write {file}: is there and was not written by a search: choose another name or remove it")


def write_best(file: Path, values: dict[str, Any], comment: str) -> None:
    """Write a layout. RecipeError where that fails."""
    try:
        write_layout(file, values, comment)
    except OSError as error:
        raise RecipeError(f"--write {file}: {error.strerror}") from error
