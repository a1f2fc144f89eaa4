"""A loss, `loss.name=focal`: tokens that the model predicts well count less (Lin et al. 2017), by the power `loss.beta`.

sum_t -(1 - p_t)^beta log p_t
"""

from framework.extend import loss


@loss("focal")
def focal(statistics, settings):
    """The sum over the tokens of a microbatch on this rank; a token without a loss has -log p = 0, and adds 0."""
    losses = statistics.of_tokens()
    return ((1 - (-losses).exp()) ** settings.beta * losses).sum()
