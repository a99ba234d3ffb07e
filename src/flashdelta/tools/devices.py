"""The default device, its clock's edge, and CUDA graphs of a call."""

from collections.abc import Callable

import torch


def default_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(run: Callable[[], tuple]) -> tuple[Callable[[], object], tuple]:
    """Captures `run` in a CUDA graph; returns its replay and the tensors each replay writes.

    Raises:
        RuntimeError: `run` does something that can't be captured, such as a host synchronisation.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results
