from __future__ import annotations
import asyncio, socket, struct, array, os
H=struct.Struct("<HIH")
class Channel:
    def __init__(self, sock, loop, *, on_message, on_lost, max_message=1<<26):
        self.sock=sock; self.loop=loop; self.on_message=on_message; self.on_lost=on_lost; sock.setblocking(False)
        self.out=[]; self.buf=bytearray(); self.fds=[]; self.lost=False; self.sched=False; self.wr=False
        loop.add_reader(sock.fileno(), self._read)
    def send(self, kind, *parts, fds=()):
        if self.lost: return
        data=b"".join(parts); self.out.append((H.pack(kind,len(data),len(fds))+data,[os.dup(f) for f in fds]))
        if not self.sched and not self.wr:
            self.sched=True; self.loop.call_soon(self.flush)
    def flush(self):
        self.sched=False
        try:
            while self.out:
                data,fds=self.out[0]
                if not fds:
                    n=1
                    while n<len(self.out) and n<64 and not self.out[n][1]: n+=1
                    if n>1:
                        data=b"".join(d for d,_ in self.out[:n]); self.out[:n]=[(data,[])]
                anc=[(socket.SOL_SOCKET,socket.SCM_RIGHTS,array.array("i",fds))] if fds else []
                n=self.sock.sendmsg([data],anc)
                for f in fds: os.close(f)
                if n<len(data): self.out[0]=(data[n:],[])
                else: self.out.pop(0)
        except BlockingIOError:
            if not self.wr: self.wr=True; self.loop.add_writer(self.sock.fileno(), self._write)
            return
        except OSError: self._lose(); return
        if self.wr: self.wr=False; self.loop.remove_writer(self.sock.fileno())
    def _write(self): self.flush()
    def _read(self):
        try: data,anc,_,_=self.sock.recvmsg(1<<18, socket.CMSG_SPACE(256))
        except BlockingIOError: return
        except OSError: self._lose(); return
        for l,t,d in anc:
            a=array.array("i"); a.frombytes(d[:len(d)-len(d)%4]); self.fds+=list(a)
        if not data: self._lose(); return
        self.buf+=data
        while len(self.buf)>=H.size:
            k,n,f=H.unpack_from(self.buf)
            if len(self.buf)<H.size+n: break
            p=bytes(self.buf[H.size:H.size+n]); del self.buf[:H.size+n]
            fds,self.fds=self.fds[:f],self.fds[f:]
            self.on_message(k,p,fds)
    def _lose(self):
        if not self.lost: self.close(); self.on_lost(None)
    def close(self):
        if not self.lost:
            self.lost=True; self.loop.remove_reader(self.sock.fileno()); self.loop.remove_writer(self.sock.fileno())
