"""ZeRO stages 0 to 3 and HSDP (Rajbhandari et al. 2020) as a table of lifetimes.

`lifetimes` says how long each state lives whole, `plan_buffers` lays a unit's tensors out in flat buffers, `buffers` are these in
memory. `parameters` unshards and reshards, `gradients` reduces, `hooks` tell when; `replicas` compares copies.
"""
