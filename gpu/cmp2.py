import sys; sys.argv=["x"]
exec(open('/work/tmp/slow_compile.py').read().split("tag=sys.argv")[0])
from flashdelta.backends import build_hopper
def go(name, **c):
    o=dict(T=8192,H=8); extra={k:c.pop(k) for k in list(c) if k in('split','return_intermediate_states','batch_invariant')}
    o|=c
    problem,t=check(chunk_kda, **(call(**o)|extra))
    for l in only_launches(build_hopper(problem,t,90)):
        ck=compiled(l,90); print(triton.__version__, name, l.kernel.__name__, costs_of(ck,90), flush=True)
go("split"); go("split packed",T=4096,H=12,N=2); go("parts",T=2048,H=16); go("whole",T=2048,H=16,split=False); go("unb",gate="softplus"); go("unb whole",gate="softplus",T=1024,split=False,N=2); go("K64",K=64)
