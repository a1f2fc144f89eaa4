"""ZeRO stages 0 to 3 and HSDP (Rajbhandari et al. 2020) as a table of lifetimes.

`buffer_plan` says how long each state lives whole and how a unit's tensors lie in a flat buffer, `plan_buffers` lays a stage out
in buffers, `buffers` are these in memory. `parameters` unshards and reshards, `gradients` reduces, `hooks` tell when;
`replicas` compares copies.
"""
