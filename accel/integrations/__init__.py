"""How a web service embeds a device: its life, its errors as HTTP answers, its health, its clients' disconnects.

:mod:`accel.integrations.fastapi` and :mod:`accel.integrations.aiohttp` are imported by name, because each needs its framework:
``pip install '.[web]'``, in a checkout.
"""
