from __future__ import annotations
import pickle, io
from accel.ref import AccelRef, RefView
class P(pickle.Pickler):
    def persistent_id(self,o):
        if isinstance(o,AccelRef): return (o.buffer,o.shape,o.dtype,o.offset if isinstance(o,RefView) else None) if not isinstance(o,RefView) else (o.buffer,o.shape,o.dtype,o.offset)
        return None
class U(pickle.Unpickler):
    def __init__(self,f,r): super().__init__(f); self.r=r
    def persistent_load(self,p): return self.r(*p)
def dump_op(x):
    f=io.BytesIO(); P(f,5).dump(x); return f.getvalue()
def load_op(d,r): return U(io.BytesIO(d),r).load()
