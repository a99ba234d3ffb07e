"""What a release shows of a GPU, in calls of minutes: `python -m tests.release --out DIR`, then `python -m tests.release.record
DIR`.

`parts` is the table of what runs, `loop` runs it, `log` keeps what each test of the GPU tier came to as it ends, `record` puts
what runs have left in a folder into `benchmarks/results/`.
"""
