import os
from tests.runtime.workers import *
import autopar.runtime.params as P, autopar.runtime.world as W, autopar.runtime.binding as B
import importlib
C = importlib.import_module("autopar.compile")
def go():
    torch.set_num_threads(1)
    what=os.environ["SABOTAGE"]
    if what=="order":
        P.param_placements=C.param_placements=B.param_placements=W.placements
    if what=="seed":
        from autopar.runtime.random import SharedRandom
        real=SharedRandom.set
        SharedRandom.set=lambda self, state: real(self, self.default())
        return dropout()
    if what=="broadcast":
        from torch.distributed.tensor import distribute_tensor as real
        P.distribute_tensor=lambda t,m,p,**k: real(t,m,p,src_data_rank=None)
    plan = stored_plan(llama(1), batch(0), "2x2", 0)
    return train(lambda: llama(1), sgd, 1, plan=plan)
