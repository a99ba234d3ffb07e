"""One launch for ncu: gpu_ncu.py pilot|short|train."""
import sys, os
what = sys.argv[1]
here = os.path.dirname(os.path.abspath(__file__))
if what == "pilot":
    import gpu_pilot as p
    sys.argv[1:] = []
    a = p.answers("pilot")
    import torch, flashdelta as fd
    x = p.inputs(torch, 8192, 16, 64, 1) | {"backend": "hopper"}
    for _ in range(3):
        fd.chunk_kda(**x)
elif what == "short":
    sys.path.insert(0, here + "/short_c/src")
    import gpu_short2 as s
    import torch, flashdelta as fd
    from flashdelta.kernels.hopper import build
    torch.set_grad_enabled(False)
    build.in_one_launch = lambda problem, device: True
    for name in ("64 x 100 H32", "200 x 40 H16"):
        call = s.make(*s.SHAPES[name])
        for _ in range(3):
            fd.chunk_kda(**call, backend="hopper")
else:
    sys.path.insert(0, here + "/t35e/src")
    import gpu_train as t
    import torch, flashdelta as fd
    call, grad_o = t.make("T8192 H32")
    for _ in range(3):
        torch.autograd.grad(fd.chunk_kda(**call, backend="hopper")[0], [call[n] for n in t.LEAVES], grad_o)
torch.cuda.synchronize()
