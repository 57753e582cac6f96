from __future__ import annotations
import asyncio, subprocess, socket, sys, os, signal
from dataclasses import dataclass
@dataclass
class ExitStatus:
    code:int
    def describe(self): return f"exit {self.code}"
class ChildProcess:
    @classmethod
    async def start(cls, system, target, *, env=None, uvloop=False, on_exit):
        self=cls(); a,b=socket.socketpair()
        self.p=subprocess.Popen([sys.executable,"-c",f"import sys,socket,asyncio,importlib; sys.path.insert(0,{os.getcwd()!r}); m,_,f='{target}'.partition(':'); s=socket.socket(fileno={b.fileno()}); asyncio.run(getattr(importlib.import_module(m),f)(s))"],pass_fds=(b.fileno(),),stdin=subprocess.DEVNULL)
        b.close(); self.sock=a; self.pid=self.p.pid; self.loop=asyncio.get_running_loop(); self.fd=os.pidfd_open(self.pid); self.on_exit=on_exit; self.ended=asyncio.Event()
        self.loop.add_reader(self.fd,self._exit); return self
    def _exit(self):
        self.loop.remove_reader(self.fd); os.close(self.fd); c=self.p.wait(); self.ended.set(); self.on_exit(ExitStatus(c))
    def kill(self):
        if not self.ended.is_set(): self.p.kill()
    async def aclose(self, grace=1.0):
        try:
            async with asyncio.timeout(grace): await self.ended.wait()
        except TimeoutError: self.kill(); await self.ended.wait()
        self.sock.close()
