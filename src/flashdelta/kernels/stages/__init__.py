"""The host side of stages that every backend's kernels share, and the kernels that both run."""
