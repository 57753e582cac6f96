"""Objects as bytes for another process: pickled by name, those of ``__main__`` by value.

A notebook's cells and a script are ``__main__``, which a child has of its own. cloudpickle, of the
extra ``notebook``, writes their classes and functions out; pickle reads them where cloudpickle is
installed.
"""

from __future__ import annotations

import pickle
from typing import Any

from accel.errors import UnsupportedError

__all__ = ["by_value", "dumps"]


def dumps(value: object) -> bytes:
    """Return the pickle of an object, by value if a part of it is defined in ``__main__``.

    Raises
    ------
    UnsupportedError
        Part of it is in ``__main__``, and cloudpickle is not installed.
    Exception
        As pickle raises it, for an object that has no name in its module.
    """
    try:
        data = pickle.dumps(value)
    except Exception as error:
        if "__main__" not in str(error):  # the module in which pickle found no such name
            raise
        return by_value(value)
    return by_value(value) if b"__main__" in data else data


def by_value(value: object) -> bytes:
    """Return the pickle of an object with what is in ``__main__`` by value; see :func:`dumps`."""
    try:
        import cloudpickle
    except ImportError:
        raise UnsupportedError(
            "what is in __main__ is not found in another process",
            remedy="Define it in a module that can be imported, load a model of a script by its name, 'script:Model', behind a main guard, "
            "or send it by value: pip install '.[notebook]', in a checkout.",
        ) from None
    data: Any = cloudpickle.dumps(value)
    return bytes(data)
