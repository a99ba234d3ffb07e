"""Benchmarks: rows (`workloads`) and what makes each row's calls (`contenders`) go through one `runner`, which checks results
(`checks`), times them (`timing`) and writes one kind of document (`report`, `views`). `benchmarks` lists them."""
