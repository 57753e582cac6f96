"""The test suite of the Python array API standard over expressions: ``python3 -m nox -s array-api``."""
