"""The gradient noise scale: the batch, in tokens, whose gradient is half noise (McCandlish et al. 2018, section 2.2).

    B_noise = B noise / signal                  noise: trace of the covariance of a batch's gradient g; signal: |E g|^2

    A = sum_k w_k |g_k|^2                       expected: signal + noise
    M = |sum_k w_k g_k|^2                       expected: signal + kappa noise,     kappa = sum_k w_k^2

    noise = (A - M) / (1 - kappa)               signal = (M - kappa A) / (1 - kappa)

w_k are the weights of the last gradients in AdamW's first moment, with its bias corrected. So M is the norm of a state that is
there anyway, A follows from norms that the run has read anyway, and the layout does not matter: a step's microbatches are not
looked at one by one. It assumes that E g changes little within 1 / (1 - beta) steps.
"""

# AdamW's state that is a mean of gradients.
FIRST_MOMENT = "exp_avg"


def average_squares(former: float | None, norm: float, beta: float, updates: int) -> float:
    """The moving average of squared norms after one more update, its bias not corrected, as the first moment's. former: after
    `updates` of them; None: not known, as where a run had none yet: all were as this one."""
    former = (1 - beta**updates) * norm * norm if former is None else former
    return beta * former + (1 - beta) * norm * norm


def estimate_noise_scale(squared_norms: float, squared_moment: float, beta: float, updates: int) -> float | None:
    """B_noise / B. squared_norms: of `average_squares`, of gradients as the optimizer has seen them, clipped; squared_moment:
    squared norm of the first moment after `updates` updates, its bias not corrected; beta: its decay. None before there are two
    gradients, and where the noise hides the signal."""
    if updates < 2:
        return None
    known = 1 - beta**updates
    mean, squared_mean = squared_norms / known, squared_moment / known**2
    kappa = (1 - beta) / (1 + beta) * (1 - beta ** (2 * updates)) / known**2
    noise, signal = mean - squared_mean, squared_mean - kappa * mean
    return noise / signal if noise >= 0 and signal > 0 else None
