"""Benchmarks: one protocol (`protocol.py`), one oracle (`oracle.py`), one table and JSON writer (`report.py`)."""
