"""A module that starts a thread when it is imported, which keeps a process from being forked."""

from __future__ import annotations

import threading

from accel.remote.service import serve

__all__ = ["serve"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
