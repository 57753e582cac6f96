"""``python -m accel``: the command line of :mod:`accel.cli`."""

from __future__ import annotations

import sys

from accel.cli import main

sys.exit(main())
