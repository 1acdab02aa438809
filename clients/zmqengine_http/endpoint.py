"""An endpoint as data, and the state that all endpoints share.

Routing, reading and validating the body, the shape of refusals and the OpenAPI document all derive from one
`Endpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec import Struct

from zmqengine_http.config import HttpConfig
from zmqengine_http.prompt.prompts import Tokenizing
from zmqengine_http.serving.body import Body
from zmqengine_http.serving.body_room import BodyRoom
from zmqengine_http.serving.errors import ErrorShape, openai_error
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.serving.fetching import ImageFetching
from zmqengine_http.serving.meter import Meter
from zmqengine_http.serving.tracing import Traces
from zmqengine_http.stable_head import StableHead
from zmqengine_http.workers.launched import LaunchedModels
from zmqengine_http.workers.pool import Pool

if TYPE_CHECKING:
    from zmqengine_http.batches.runner import Batches

RequestT = TypeVar("RequestT", bound=Struct)


class Service(NamedTuple):
    """The state of one front-end process, shared by all endpoints.

    `traces` is None unless tracing is on, `launched` unless the models are those of a launcher, `fetching` unless
    images behind URLs are fetched. `batches` sends the lines of batches to the application itself.
    """

    config: HttpConfig
    pool: Pool
    tokenizing: Tokenizing
    bodies: BodyRoom
    head: StableHead
    meter: Meter
    traces: Traces | None
    launched: LaunchedModels | None = None
    fetching: ImageFetching | None = None
    batches: Batches | None = None


class Endpoint(NamedTuple):
    """A path and its handler; made by `get`, `delete` and `post`.

    `answer` gets the service, the exchange and, if there is a `body`, the decoded request. An empty `method`
    accepts any. `open`: no API key is required. `streams`: the response may be server-sent events.
    `error_shape` encodes refusals; `busy_status` is the status of those for lack of a ready worker. `needs_model`: a
    launcher loads the `model` of the body first.
    """

    path: str
    method: str
    answer: Callable[..., Coroutine[Any, Any, None]]
    summary: str
    body: Body[Any] | None = None
    open: bool = False
    streams: bool = False
    error_shape: ErrorShape = openai_error
    needs_model: bool = False
    busy_status: int = 503


def get(
    path: str,
    answer: Callable[[Service, Exchange], Coroutine[Any, Any, None]],
    summary: str,
    *,
    open: bool = False,
    error_shape: ErrorShape = openai_error,
) -> Endpoint:
    """An endpoint for GET and HEAD."""
    return Endpoint(path, "GET", answer, summary, open=open, error_shape=error_shape)


def delete(
    path: str, answer: Callable[[Service, Exchange], Coroutine[Any, Any, None]], summary: str
) -> Endpoint:
    """An endpoint for DELETE."""
    return Endpoint(path, "DELETE", answer, summary)


def post(
    path: str,
    body: Body[RequestT],
    answer: Callable[[Service, Exchange, RequestT], Coroutine[Any, Any, None]],
    summary: str,
    *,
    streams: bool = False,
    error_shape: ErrorShape = openai_error,
    needs_model: bool = True,
    busy_status: int = 503,
) -> Endpoint:
    """An endpoint for POST with a JSON body; `answer` is cancelled if the client disconnects."""
    return Endpoint(
        path, "POST", answer, summary, body,
        streams=streams, error_shape=error_shape, needs_model=needs_model and "model" in body.supported,
        busy_status=busy_status,
    )  # fmt: skip
