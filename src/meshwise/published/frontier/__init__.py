"""The limits that data movement sets to the largest training runs.

`device` has the rates of a chip, `layer` is one linear layer on one microbatch,
`laws` and `assumptions` say how model, data and batch grow with compute, `step` is one training step,
`run` the search over its parallelism, `failures` what interruptions cost. docs/frontier.md derives it.
"""
