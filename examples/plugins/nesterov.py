"""An optimizer, `optim.name=nesterov`: SGD that looks ahead along its momentum (Nesterov 1983; Sutskever et al. 2013).

    v <- b v + g        p <- (1 - lr wd) p - lr (g + b v)

A rule sees elements, one by one. Shards, the clipping of the global norm and skipped steps are the framework's.
"""

from framework.extend import optimizer


@optimizer("nesterov", states={"velocity": 0.9})
def nesterov(value, gradient, states, lr, weight_decay, optim):
    """One update of some elements: new tensors, nothing in place."""
    velocity = optim.momentum * states["velocity"] + gradient
    step = gradient + optim.momentum * velocity
    return (1 - lr * weight_decay) * value - lr * step, {"velocity": velocity}
