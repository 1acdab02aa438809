"""The OpenAPI document, and what a generator of requests finds with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.front import Front, Reply, call, chat, get, post, serving, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.apis.chat_completions.request import CHAT_BODY
from zmqengine_http.apis.completions.request import COMPLETION_BODY
from zmqengine_http.endpoints import ENDPOINTS

EXAMPLES = int(os.environ.get("ZMQENGINE_TEST_EXAMPLES", "15"))
STATUSES = {200, 400, 404, 405, 413, 504}  # 504: a deadline_ms of a moment can pass.
OPERATIONS = ["POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """A worker that ends every answer after 3 tokens: what is looked for are refusals and crashes."""
    with (
        FakeWorker(FakeEngineConfig(eos_index=3), process=True) as worker,
        serving(HttpConfig(workers=(worker.address,), default_temperature=0)) as front,
    ):
        yield front


def test_every_endpoint_is_described(front: Front) -> None:
    """Routes, bodies and the document come from one table."""
    paths = get(front, "/openapi.json").json["paths"]
    for endpoint in ENDPOINTS[:-2]:
        operation = paths[endpoint.path.replace(":path", "")][endpoint.method.lower()]
        assert operation["summary"] == endpoint.summary
        assert ("requestBody" in operation) == (endpoint.body is not None)


def test_the_document_is_served_with_a_page(front: Front) -> None:
    """The page needs nothing from elsewhere."""
    document = get(front, "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) >= {
        "/v1/chat/completions",
        "/v1/models/{id}",
        "/tokenize",
        "/health",
        "/ready",
    }
    page = get(front, "/docs").body.decode()
    assert "/v1/chat/completions" in page
    assert "http://" not in page
    assert "https://" not in page


def check(reply: Reply) -> None:
    """One of the statuses we have, and errors in shape."""
    assert reply.status in STATUSES, reply.body[:500]
    if reply.status >= 400:
        assert reply.error["message"]


@pytest.mark.process
@pytest.mark.parametrize("operation", OPERATIONS)
def test_requests_made_from_the_document_find_no_500(front: Front, operation: str) -> None:
    """A property-based run of schemathesis: valid and invalid bodies, whatever the schema allows."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(get(front, "/openapi.json").json)
    method, path = operation.split()

    @given(case=schema[path][method].as_strategy())
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
    def run(case: Any) -> None:
        try:
            body = msgspec.json.encode(case.body)
        except (msgspec.MsgspecError, TypeError, UnicodeEncodeError):
            # It cannot be written as JSON.
            return
        check(call(front, method, path, body))

    run()
    assert get(front, "/health").status == 200


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


KNOWN = sorted({*CHAT_BODY.supported, *CHAT_BODY.fields, *COMPLETION_BODY.supported, *COMPLETION_BODY.fields})


@given(st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=4), st.booleans())
@settings(
    max_examples=3 * EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_json_in_known_fields_finds_no_500(front: Front, extra: dict[str, Any], is_chat: bool) -> None:
    """A good request in which known fields hold anything at all."""
    body = {**(chat(max_tokens=3) if is_chat else {"prompt": "a"}), **extra}
    check(post(front, "/v1/chat/completions" if is_chat else "/v1/completions", body))


@given(st.binary(max_size=300))
@settings(max_examples=3 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_find_no_500(front: Front, body: bytes) -> None:
    """The body is not even JSON."""
    check(call(front, "POST", "/v1/chat/completions", body))


def test_nothing_is_left_running_after_all_that(front: Front) -> None:
    """Every request above ended."""
    wait_until(lambda: front.service.pool.workers[0].running == 0, "all have ended")
