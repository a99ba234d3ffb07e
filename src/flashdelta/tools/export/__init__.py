"""`flashdelta export`: the portable kernels as a C library. `cubins.py` says which and compiles them, `write.py` writes the
folder, `bindings.py` calls the built library from Python, `c/` is the part of the library that is the same in every export.

Imported from where they are: `bindings.py` needs no Triton, and benchmarks import it.
"""
