"""The prompt of the command that a run suggests."""

import pytest

from framework.recipe.compose import compose
from framework.train.reports import find_prompt


@pytest.mark.parametrize(("sample", "prompt"), [("", ""), ("Once\nupon", "Once")])
def test_a_prompt_is_the_first_line_of_the_sample_and_may_be_empty(sample, prompt):
    recipe = compose([f'train.sample="{sample}"']).require()
    assert find_prompt(recipe, prepared=None) == prompt
