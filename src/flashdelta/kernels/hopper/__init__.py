"""Gluon kernels for Hopper (sm_90): the stages `prepare` and `recurrence` of docs/algorithm.md with wgmma and asynchronous
copies. docs/hopper-prefill.md walks through them."""
