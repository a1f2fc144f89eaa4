"""Pipeline parallelism: schedules as data, and one executor.

`schedules` writes each rank's list of actions, `simulate` times them, `pipeline` divides a model into stages, `lower` adds
messages and buffers, `execute` runs the result; `draw` shows it.
"""
