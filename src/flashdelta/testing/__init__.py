"""Cases, inputs, float64 truth and tolerances: one set for the tests, the benchmarks and `flashdelta verify`.

| module | what |
| --- | --- |
| `cases` | calls of `chunk_kda` and why each is there |
| `inputs` | from a case to arguments: seeded, on any device |
| `oracle` | the truth, measures of error, tolerances |
| `decoding`, `prefills`, `wy` | the same for `recurrent_kda`, `kda_prefill`, `kernels.chunk_bwd_wy_dqkg` |
"""
