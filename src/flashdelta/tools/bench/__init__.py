"""Benchmarks: a table of rows (`cases`) and a way to make each row's calls (`contenders`) go through one `runner`, which checks
results (`checks`), times them (`timing`) and writes one kind of document (`report`, `views`). `benchmarks` lists them."""
