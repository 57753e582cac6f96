"""A module that starts a thread with the name of jemalloc's when it is imported, as pyarrow does."""

from __future__ import annotations

import threading
from pathlib import Path

thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
Path(f"/proc/self/task/{thread.native_id}/comm").write_text("jemalloc_bg_thd", encoding="ascii")
