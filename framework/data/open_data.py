"""The prepared data of a run, opened on every rank."""

from transformers import PretrainedConfig

from framework.comm.communicator import Communicator
from framework.comm.objects import share_errors, tell
from framework.data.fit import check_data_fits
from framework.data.prepared import FoundStores, Prepared, find_prepared, open_found
from framework.recipe.schema import Recipe


def open_data(recipe: Recipe, config: PretrainedConfig, world: Communicator) -> Prepared:
    """The prepared data on this rank. Rank 0 alone lists the source files and looks for the stores; the others open the few
    files that it names. An error on one rank is every rank's. Collective."""

    def find() -> FoundStores:
        found = find_prepared(recipe)
        check_data_fits(recipe, found, config)
        return found

    found = tell(find, world)
    return share_errors(lambda: open_found(found), world)
