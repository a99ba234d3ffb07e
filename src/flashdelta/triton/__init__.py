"""Portable Triton kernels (sm_80 and newer), one file a stage; `launch.py` makes programs of them."""
