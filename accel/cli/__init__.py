"""The command line: ``python -m accel doctor | devices | demo | bench | serve``.

A command is a module with ``add_arguments(parser)`` and ``run(arguments)``, imported only when it is asked for.
"""

from __future__ import annotations

from accel.cli.main import main

__all__ = ["main"]
