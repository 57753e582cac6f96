"""``python -m accel``: the command line of :mod:`accel.cli`."""

from __future__ import annotations

import sys

try:
    from accel.cli import main

    code = main()
except KeyboardInterrupt:
    # Before main() could take it: importing takes a moment too.
    print("accel: interrupted", file=sys.stderr)
    code = 130
sys.exit(code)
