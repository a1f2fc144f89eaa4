"""`meshwright search`: all layouts of a recipe on its ranks, the best first; written as a file, and tried."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from framework.errors import RecipeError
from framework.imports import loading_libraries
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
    parser.add_argument(
        "--nodes", metavar="N,N,...", help="compare the best layouts of several numbers of nodes, such as 4,8,16"
    )
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
        help="train the best layouts of N meshes for some steps each, here or as a SLURM array, correct the cluster's rates"
        " by what was measured, and rank again",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page to look at in a browser: one file; some seconds more"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write its charts as a picture")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="write in place of files that are not ours, too (--write, --html, --png)",
    )
    parser.add_argument("--try-steps", type=int, default=10, metavar="S", help="steps of each of them (default: 10)")
    parser.add_argument(
        "--tried", type=Path, metavar="FOLDER", help="read what an array of --try has measured, correct and rank again"
    )


def ask(arguments: argparse.Namespace, more: Sequence[str] = ()) -> Asked:
    """What the command line asks for, and more overrides. RecipeError with all that is wrong with it."""
    for name, least in (("best", 1), ("try_best", 1), ("try_steps", 3)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise RecipeError(f"--{name.replace('_best', '').replace('_', '-')} {value}: at least {least}")
    if arguments.write is not None:
        _refuse_file(arguments.write, overwrite=arguments.overwrite)
    if arguments.html is not None or arguments.png is not None:
        from framework.plan.page_html import require_pages

        require_pages(html=arguments.html, png=arguments.png, overwrite=arguments.overwrite)
    overrides = [*arguments.overrides, *more]
    composition = compose_open(overrides, arguments.recipes)
    pinned = find_pins(composition, overrides, arguments.recipes)
    pinned = change_pins(pinned, free=arguments.free, keep=arguments.keep)
    return Asked(composition.require(), pinned, overrides, arguments.recipes, arguments)


def find(asked: Asked, cluster: Any = None) -> Any:
    """The search on a cluster, the recipe's where none is given. RecipeError where no layout can be trained."""
    with loading_libraries():
        from framework.plan.find import Question, best_of, search

    options = asked.options
    meshes = options.try_best or 0
    best = max(options.best, meshes)
    question = Question(asked.recipe, asked.pinned, by=options.by, best=best, cluster=cluster, meshes=meshes)
    result = search(question)
    best_of(result)
    return result


def show(asked: Asked, result: Any, cluster: Any = None, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print what was found, and write the files that are wanted. more: what the one JSON object says beside it."""
    from framework.plan.find import cluster_name, values_for
    from framework.plan.search_text import comment_of, to_json

    options, best = asked.options, result.ranked[0]
    name = cluster.name if cluster else cluster_name(asked.recipe)
    if options.json:
        values = [values_for(each, asked.recipe, asked.pinned) for each in result.ranked]
        print(json.dumps({**to_json(result, name, asked.pinned, values, is_full=options.rejections), **more}))
    else:
        print_table(asked, result, name)
    if options.write is not None:
        write_best(options.write, values_for(best, asked.recipe, asked.pinned), comment_of(best, name, asked.recipe))
        if not options.json:
            print(f"\nwrote {options.write}: meshwright plan layout={options.write} ...")
    if options.html is not None or options.png is not None:
        _write_page(asked, cluster)


def print_table(asked: Asked, result: Any, name: str) -> None:
    """The best as a table, and what became of the others."""
    from framework.plan.search_text import describe_rejections, describe_search

    print("\n".join(describe_search(result, name, asked.pinned, shown=asked.options.best)))
    if asked.options.rejections:
        print("\n".join(["", *describe_rejections(result)]))


def _write_page(asked: Asked, cluster: Any) -> None:
    from framework.plan.find import Question
    from framework.plan.page_of_search import explore, make_search_page
    from framework.plan.page_png import write_pages

    options = asked.options
    page = make_search_page(*explore(Question(asked.recipe, asked.pinned, by=options.by, cluster=cluster)))
    for path in write_pages(page, html=options.html, png=options.png):
        print(f"wrote {path}", file=sys.stderr if options.json else sys.stdout)


def _refuse_file(file: Path, *, overwrite: bool) -> None:
    """Raises RecipeError where a layout cannot be written, or something else would be lost: before anything is searched."""
    if not file.parent.is_dir():
        raise RecipeError(f"--write {file}: there is no folder {file.parent}, make it first")
    if file.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--write {file}: end the name in .yaml, so that layout={file} reads it")
    if overwrite or not file.exists():
        return
    if "layout=THIS_FILE" not in file.read_text(encoding="utf-8", errors="replace"):
        raise RecipeError(
            f"--write {file}: is there and was not written by a search: choose another name, or --overwrite"
        )


def write_best(file: Path, values: dict[str, Any], comment: str) -> None:
    """Write a layout. RecipeError where that fails."""
    try:
        write_layout(file, values, comment)
    except OSError as error:
        raise RecipeError(f"--write {file}: {error.strerror}") from error
