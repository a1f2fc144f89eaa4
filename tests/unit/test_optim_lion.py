"""Lion against the paper's Algorithm 2 written out per element, and its device-side scale and skip."""

import math

import pytest
import torch

from framework.optim.update_rules import RuleOptimizer, update_lion

LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1


def make_lion(parameters, lr=LR, weight_decay=0.0):
    return RuleOptimizer(parameters, update_lion, ("exp_avg",), lr=lr, betas=BETAS, weight_decay=weight_decay)


def lion_by_hand(weights, gradients_per_step, lr=LR, betas=BETAS, decay=DECAY):
    """Algorithm 2 with Python floats; returns the weights after each step."""
    weights, moments, history = list(weights), [0.0] * len(weights), []
    for gradients in gradients_per_step:
        for i, g in enumerate(gradients):
            c = betas[0] * moments[i] + (1 - betas[0]) * g
            update = math.copysign(1.0, c) if c != 0 else 0.0
            weights[i] -= lr * (update + decay * weights[i])
            moments[i] = betas[1] * moments[i] + (1 - betas[1]) * g
        history.append(list(weights))
    return history


def make_parameters(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def test_lion_equals_the_papers_algorithm_over_five_steps():
    parameters = make_parameters((3, 5), (), (7,))
    start, gradients, got = flat(parameters).tolist(), [], []
    optimizer = make_lion(parameters, weight_decay=DECAY)
    for step in range(5):
        set_gradients(parameters, step)
        parameters[1].grad.mul_(0)  # a gradient of zero moves by the decay only while the moment is zero
        gradients.append(flat([p.grad for p in parameters]).tolist())
        optimizer.step()
        got.append(flat(parameters))
    for got_step, expected in zip(got, lion_by_hand(start, gradients), strict=True):
        torch.testing.assert_close(got_step, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_groups_use_their_own_rate_and_decay_and_parameters_without_gradient_stay():
    fast, slow, unused = make_parameters((4,), (4,), (4,))
    before = [p.detach().clone() for p in (fast, slow, unused)]
    optimizer = make_lion([{"params": [fast], "lr": 0.1}, {"params": [slow, unused], "lr": 0.0}], weight_decay=0.0)
    set_gradients([fast, slow], 0)
    optimizer.step()
    torch.testing.assert_close(fast.detach(), before[0] - 0.1 * fast.grad.sign())
    assert torch.equal(slow, before[1])
    assert torch.equal(unused, before[2])
    assert unused not in optimizer.state


def test_grad_scale_divides_gradients_as_torchs_fused_adamw_does():
    scaled, plain = make_parameters((9,)), make_parameters((9,))
    for optimizer_class in (make_lion, lambda params, **k: torch.optim.AdamW(params, fused=True, **k)):
        with_scale, without = optimizer_class(scaled, lr=LR), optimizer_class(plain, lr=LR)
        for step in range(3):
            set_gradients(scaled, step)
            set_gradients(plain, step)
            for p in scaled:
                p.grad.mul_(8.0)
            with_scale.grad_scale = torch.tensor(8.0)
            with_scale.found_inf = torch.tensor(0.0)
            with_scale.step()
            without.step()
        assert torch.equal(flat(scaled), flat(plain))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_found_inf_leaves_weights_and_moments_untouched_and_the_next_step_goes_on(bad):
    skipping, plain = make_parameters((9,), dtype=torch.float32), make_parameters((9,), dtype=torch.float32)
    skips, runs = make_lion(skipping, lr=LR, weight_decay=DECAY), make_lion(plain, lr=LR, weight_decay=DECAY)
    for step in range(4):
        set_gradients(skipping, step)
        set_gradients(plain, step)
        skips.found_inf = torch.tensor(0.0)
        if step == 2:
            skipping[0].grad[4] = bad
            skips.found_inf = torch.tensor(1.0)
        skips.step()
        if step != 2:
            runs.step()
        assert torch.equal(skipping[0], plain[0])
        assert torch.equal(skips.state[skipping[0]]["exp_avg"], runs.state[plain[0]]["exp_avg"])


def test_a_step_reads_no_tensor_on_the_host():
    """On the meta device every host read (`.item()`, `if tensor`) raises, so a step that ends has not synchronised."""
    parameter = torch.nn.Parameter(torch.zeros(4, device="meta"))
    parameter.grad = torch.zeros(4, device="meta")
    optimizer = make_lion([parameter], lr=LR, weight_decay=DECAY)
    optimizer.grad_scale = torch.tensor(2.0, device="meta")
    optimizer.found_inf = torch.tensor(0.0, device="meta")
    optimizer.step()
    with pytest.raises(RuntimeError):
        bool(optimizer.found_inf > 0)


def test_state_dict_round_trip_continues_the_same_trajectory():
    straight, restored = make_parameters((6,)), make_parameters((6,))
    first = make_lion(straight, lr=LR, weight_decay=DECAY)
    set_gradients(straight, 0)
    first.step()
    second = make_lion(restored, lr=LR, weight_decay=DECAY)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        restored[0].copy_(straight[0])
    for optimizer, parameters in ((first, straight), (second, restored)):
        set_gradients(parameters, 1)
        optimizer.step()
    assert torch.equal(straight[0], restored[0])
