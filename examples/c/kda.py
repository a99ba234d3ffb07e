"""KDA from Python without flashdelta: libflashdelta.so through ctypes, on PyTorch's memory and stream.

    python examples/c/kda.py FOLDER

FOLDER is what `flashdelta export` wrote, built in FOLDER/build. Prints the errors of a prefill in float32, of one in bfloat16,
and of one more token from the latter's final state; the exit code is 1 if one is off.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

H, T, K, V, C = 4, 1000, 128, 128, 64
BF16 = torch.bfloat16


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`o [H, T, V]` token by token, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, rows = q.new_zeros(H, K, V), []
    for t in range(q.shape[1]):
        state = g[:, t, :, None].exp() * state
        found = torch.einsum("hk,hkv->hv", k[:, t], state)
        state = state + torch.einsum("hk,hv->hkv", k[:, t], beta[:, t, None] * (v[:, t] - found))
        rows.append(torch.einsum("hk,hkv->hv", q[:, t], state) / K**0.5)
    return torch.stack(rows, dim=1)


def inputs() -> tuple[Tensor, ...]:
    """Inputs of T + 1 tokens, in float32, with values that bfloat16 holds."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(H, T + 1, K), dim=-1) for _ in range(2))
    found = (q, k, torch.randn(H, T + 1, V), -0.2 * torch.rand(H, T + 1, K), torch.rand(H, T + 1))
    return tuple(x.bfloat16().float() for x in found)


def right(name: str, got: Tensor, want: Tensor, tolerance: float) -> bool:
    error = ((got.double().cpu() - want).norm() / want.norm()).item()
    good = error <= tolerance
    print(f"{name:20} error {error:.1e}, at most {tolerance:.0e}: {'right' if good else 'WRONG'}")
    return good


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    from flashdelta_ctypes import DecodeArgs, Library, PrefillArgs

    library = Library(str(folder / "build" / "libflashdelta.so"))
    tensors = inputs()
    want = recurrence(*tensors)
    stream = torch.cuda.current_stream().cuda_stream
    prompt = [x[:, :T].contiguous().cuda() for x in tensors]
    sizes = {"B": 1, "H": H, "T": T, "K": K, "V": V, "C": C}

    def prefill(dtype: torch.dtype, kind: str, **results: Tensor) -> Tensor:
        given = dict(zip(("q", "k", "v"), (x.to(dtype) for x in prompt[:3])))
        given |= {"g": prompt[3], "beta": prompt[4], "o": torch.full((H, T, V), torch.nan, dtype=dtype, device="cuda")}
        given |= results
        size = library.workspace_bytes(PrefillArgs(**sizes), kind)
        given["workspace"] = torch.empty(size, dtype=torch.uint8, device="cuda")
        pointers = {name: x.data_ptr() for name, x in given.items()}
        library.prefill(PrefillArgs(**sizes, **pointers, workspace_bytes=size), stream, kind)
        torch.cuda.synchronize()  # before the workspace is let go
        return given["o"]

    chunks = -(-T // C)
    w, u = torch.empty(H, chunks, C, K, device="cuda"), torch.empty(H, chunks, C, V, device="cuda")
    good = [right("prefill, float32", prefill(torch.float32, "f32", w=w, u=u), want[:, :T], 1e-5)]

    pool = torch.zeros(1, H, V, K, device="cuda")
    good.append(right("prefill, bfloat16", prefill(BF16, "bf16", final_state=pool), want[:, :T], 6e-3))

    last = [x[:, T].contiguous().cuda() for x in tensors]
    given = dict(zip(("q", "k", "v"), (x.to(BF16) for x in last[:3]))) | {"g": last[3], "beta": last[4], "states": pool}
    given["state_indices"] = torch.zeros(1, dtype=torch.int32, device="cuda")
    given["o"] = torch.full((H, V), torch.nan, dtype=BF16, device="cuda")
    pointers = {name: x.data_ptr() for name, x in given.items()}
    library.decode(DecodeArgs(N=1, H=H, slots=1, K=K, V=V, **pointers), stream)
    good.append(right("decode, bfloat16", given["o"], want[:, T], 1e-2))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
