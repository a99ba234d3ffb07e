"""A test that keeps looking: random and mutated calls of every public operator (`make fuzz SECONDS=600 SEED=7 JOBS=12`).

`draw` draws calls, `truth` says what they must do, `modes` how they are run, `mutate` what is made odd of them; `memory` lays
tensors between guard zones, `runner` counts and prints.
"""
