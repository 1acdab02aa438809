"""An OpenAI-compatible HTTP front-end for zmqengine workers, built on `zmqengine_client` alone.

`zmqengine http --worker NAME` runs it. In a program of your own: `create_app(HttpConfig(workers=("NAME",)))` is an ASGI
application.
"""

from zmqengine_http.app import create_app
from zmqengine_http.config import HttpConfig

__all__ = ["HttpConfig", "create_app"]
