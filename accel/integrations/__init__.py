"""A device in a web service: opened and closed with the application, errors as HTTP answers, health routes, cancellation on disconnect.

:mod:`accel.integrations.fastapi` and :mod:`accel.integrations.aiohttp` are imported by name, because each needs its framework:
``pip install '.[web]'``, in a checkout.
"""
