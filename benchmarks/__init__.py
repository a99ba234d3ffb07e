"""Benchmarks beside other libraries: `python -m benchmarks.prefill`, `decode`, `train`, `layer`, `ranks` and `serve`.

`workloads` has the rows, `contenders` the calls of other libraries, `gate` the checks, `timing` the clocks, `run` the command
and the JSON, `tables` the tables and the picture that documents show.
"""
