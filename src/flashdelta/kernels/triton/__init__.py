"""Portable Triton kernels (sm_80 and newer), one file a stage; `device/` has the device functions that stages share."""
