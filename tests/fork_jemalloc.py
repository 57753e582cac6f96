"""Starts a thread with the name of jemalloc's when it is imported, as pyarrow does, and is taken for pyarrow with the environment variable set."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
if os.environ.get("TESTS_PYARROW"):
    sys.modules["pyarrow"] = sys.modules[__name__]
Path(f"/proc/self/task/{thread.native_id}/comm").write_text("jemalloc_bg_thd", encoding="ascii")
