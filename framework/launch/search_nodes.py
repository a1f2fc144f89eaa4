"""`meshwright search --nodes 4,8,16`: the best layout of each number of nodes, compared, then all of the best one's."""

import argparse
from dataclasses import replace

from framework.errors import EXIT_DONE, MeshwrightError, RecipeError
from framework.launch.machine import check_measured
from framework.launch.search import Asked, ask, find, show


def compare_nodes(arguments: argparse.Namespace) -> int:
    """Search each number of nodes; numbers on which nothing can be trained are said. RecipeError where none can be."""
    from framework.plan.search_text import NodesRow, describe_nodes, order_nodes

    if arguments.try_best is not None or arguments.tried is not None:
        raise RecipeError("--nodes compares forecasts: --try and --tried are for one number, launch.nodes=N")
    rows: list[NodesRow] = []
    found = {}
    for nodes in read_counts(arguments.nodes):
        try:
            asked = _ask(arguments, nodes)
            found[nodes] = asked, find(asked)
        except MeshwrightError as error:
            rows.append(NodesRow(nodes, reason=" ".join(str(error).split())))
            continue
        rows.append(NodesRow(nodes, found[nodes][1].ranked[0]))
    rows = order_nodes(rows, by=arguments.by)
    if rows[0].best is None:
        raise RecipeError("\n".join(f"{each.nodes} nodes: {each.reason}" for each in rows))
    if not arguments.json:
        print("\n".join([*describe_nodes(rows, by=arguments.by), ""]))
    show(*found[rows[0].nodes], more={"nodes": [each.to_json() for each in rows]})
    if arguments.write is not None and not arguments.json:
        print(f"it is of launch.nodes={rows[0].nodes}")
    return EXIT_DONE


def read_counts(text: str) -> list[int]:
    """The numbers of `4,8,16`, each once. RecipeError where they are none."""
    counts = [int(each) if each.strip().isdecimal() else 0 for each in text.split(",")]
    if min(counts) < 1:
        raise RecipeError(f"--nodes {text}: numbers of nodes with commas between them, such as 4,8,16")
    return list(dict.fromkeys(counts))


def _ask(arguments: argparse.Namespace, nodes: int) -> Asked:
    own = argparse.Namespace(**vars(arguments))
    own.overrides = [text for text in arguments.overrides if not text.startswith("launch.nodes=")]
    asked = ask(own, [f"launch.nodes={nodes}"])
    if asked.recipe.launch.kind == "local":
        raise RecipeError("--nodes: launch.kind=local has one node, this machine: launch.kind=slurm, or leave it out")
    check_measured(asked.recipe)
    return replace(asked, options=arguments)
