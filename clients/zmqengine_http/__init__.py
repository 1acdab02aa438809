"""An OpenAI-compatible HTTP front-end for zmqengine workers, built on `zmqengine_client` alone.

`zmqengine http --worker NAME` runs it. In your own program, `HttpApp(HttpConfig(workers=("NAME",)))` is an
ASGI application.
"""

from zmqengine_http.app import HttpApp
from zmqengine_http.config import HttpConfig

__all__ = ["HttpApp", "HttpConfig"]
