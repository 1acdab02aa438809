"""An OpenAI-compatible HTTP front-end for zmqengine workers, built on `zmqengine_client` alone.

`zmqengine http --worker NAME` runs it. In your own program, `HttpApp(HttpConfig(workers=("NAME",)))` is an ASGI
application.

A chat takes this way: `app` (access, body), `apis/NAME/request.py` (schema), `apis/NAME` (to a `Chat`),
`generating/chat.py` (to a `Prompt` by `stable_head` and `prompt`, and a `Constraint`), `generating/generation.py`
(a worker of the pool, and a token stream per choice), `answers/choice.py` (tokens to events), `answers/respond.py` and
`apis/NAME/writer.py` (events to bytes).
"""

from zmqengine_http.app import HttpApp
from zmqengine_http.config import HttpConfig

__all__ = ["HttpApp", "HttpConfig"]
