import time, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from ndtrain.config import world_from_env
from ndtrain.parallel.cp import cp_core, Links
from ndtrain.collectives import Pending
from ndtrain.sequence import SequenceCut
from ndtrain.model.attention import Scores, local_core
from tests.ranks import run_ranks

class Nothing(Links):
    def shift(self, send, receive): return Pending(())
    def exchange(self, s, r): return Pending(())
class Timed(Links):
    waited = 0.0
    def _t(self, p):
        outer=self
        class W:
            def wait(self):
                t=time.perf_counter(); p.wait(); outer.waited += time.perf_counter()-t
        return W()
    def shift(self, *a): return self._t(super().shift(*a))
    def exchange(self, *a): return self._t(super().exchange(*a))

def qkv(B,S,N,D,dtype):
    return [torch.randn(B,S,N,D,dtype=dtype).requires_grad_() for _ in range(3)]+[torch.randn(B,S,N,D,dtype=dtype)]

def once(core,q,k,v,g,ctx):
    t=time.perf_counter(); out=core(q,k,v,ctx); f=time.perf_counter()
    torch.autograd.grad(out,(q,k,v),g); return f-t, time.perf_counter()-f

def case(S, n, ulysses, reps, dtype, B=1, prof=False):
    r=world_from_env()[0]; N,D=8,64
    ctx=SimpleNamespace(scores=Scores())
    cut=SequenceCut(S,n//ulysses,ulysses); W=dist.group.WORLD
    timed=Timed(cut,W,r)
    variants={'real':cp_core(cut,W,r),'silent':cp_core(cut,W,r,Nothing(cut,W,r)),'timed':cp_core(cut,W,r,timed)}
    x=qkv(B,S//n,N,D,dtype); whole=qkv(B,S,N,D,dtype)
    res={k:[] for k in (*variants,'one')}; waits=[]
    for rep in range(reps):
        for name,core in variants.items():
            for _ in range(2):
                dist.barrier(); w=timed.waited; got=once(core,*x,ctx)
            res[name].append(got)
            if name=='timed': waits.append(timed.waited-w)
        dist.barrier()
        if r==0: res['one'].append(once(local_core,*whole,ctx))
        dist.barrier()
    if prof and r==0:
        pass
    med=lambda l: sorted(l)[len(l)//2]
    return {k: (med([a for a,b in v])*1e3, med([b for a,b in v])*1e3, med([a+b for a,b in v])*1e3) for k,v in res.items() if v}, med(waits)*1e3

if __name__=='__main__':
    import tests.tmp_a_time as m
    dt=getattr(torch, sys.argv[2]) if len(sys.argv)>2 else torch.float32
    for S,n,u in [tuple(map(int,a.split(','))) for a in sys.argv[1].split()]:
        out=run_ranks(m.case,n,S,n,u,7 if S<4096 else 3,dt)
        res,w=out[0]
        worst=max(o[0]['real'][2] for o in out)
        print(f"S={S} n={n} u={u}", {k:'f%.0f b%.0f t%.0f'%v for k,v in res.items()}, 'wait %.0f'%w, 'ratio to ideal %.2f (worst rank)'%(worst/(res['one'][2]/min(n,2))),flush=True)
