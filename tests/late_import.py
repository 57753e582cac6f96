"""A module that a model imports when it is built: it remembers in which process it was imported."""

from __future__ import annotations

import os

IMPORTED_BY = os.getpid()
