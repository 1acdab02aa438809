"""The embedding and rerank endpoints, and the official clients that use them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.embedding.checkpoints import case, write
from tests.http.front import Front, get, post, serving, wait_until
from tests.http.programs.programs_of_others import results_of, wanted
from tests.support.workers import START_S, WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.fake.fake_vectors import fake_vector
from zmqengine.testing import FakeWorker
from zmqengine_client import Client
from zmqengine_client.core.embedding import Embedded
from zmqengine_client.text.reranking import probability
from zmqengine_http import HttpConfig
from zmqengine_http.apis import embeddings
from zmqengine_http.apis.embeddings import embeddings_document, floats_of

WIDTH = 24


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """A front-end on three workers: one that embeds, one that ranks, one that does neither."""
    configs = (
        FakeEngineConfig(name="embedder", dimensions=WIDTH, context_tokens=64),
        FakeEngineConfig(name="ranker", labels=1, generates=False),
        FakeEngineConfig(name="chatty"),
    )
    with contextlib.ExitStack() as stack:
        addresses = tuple(stack.enter_context(FakeWorker(config)).address for config in configs)
        front = stack.enter_context(serving(HttpConfig(workers=addresses, probe_ms=200)))
        wait_until(lambda: len(front.service.pool.models()) == 3, "all models are known")
        yield front


def embed(front: Front, given: object, **fields: object) -> Any:
    """The response of /v1/embeddings, which is a 200."""
    reply = post(front, "/v1/embeddings", {"model": "embedder", "input": given, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def vectors(document: Any) -> np.ndarray:
    """The vectors of a response, in the order of their indices."""
    assert [each["index"] for each in document["data"]] == list(range(len(document["data"])))
    assert {each["object"] for each in document["data"]} == {"embedding"}
    return np.array([each["embedding"] for each in document["data"]], np.float32)


def ids_of(front: Front, text: str) -> list[int]:
    return front.service.pool.model("embedder").tokenizer.encode(text)


def test_every_form_of_input_gives_the_vector_of_its_tokens(front: Front) -> None:
    """A text, texts, token ids, lists of token ids."""
    ids = ids_of(front, "abc")
    expected = fake_vector(ids, WIDTH)
    for given in ("abc", ["abc"], ids, [ids]):
        document = embed(front, given)
        np.testing.assert_allclose(vectors(document), [expected], atol=1e-7)
        assert document["object"] == "list"
        assert document["model"] == "embedder"
        assert document["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert vectors(embed(front, ["abc", "d", "abc"])).shape == (3, WIDTH)


def test_base64_holds_the_same_floats(front: Front) -> None:
    """Little-endian, as openai-python reads it by default."""
    packed = embed(front, "abc", encoding_format="base64", user="u1")["data"][0]["embedding"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed), "<f4"), fake_vector(ids_of(front, "abc"), WIDTH)
    )


def test_dimensions_cut_and_scale(front: Front) -> None:
    """More than the model has are refused with the number."""
    short = vectors(embed(front, "abc", dimensions=5))[0]
    whole = fake_vector(ids_of(front, "abc"), WIDTH)[:5]
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole), atol=1e-6)
    reply = post(front, "/v1/embeddings", {"model": "embedder", "input": "a", "dimensions": 25})
    assert reply.status == 400
    assert reply.error["param"] == "dimensions"
    assert "more than the 24" in reply.error["message"]


def test_a_text_that_is_too_long_is_a_400_with_the_numbers(front: Front) -> None:
    """And is cut where the client says so, in no other case."""
    reply = post(front, "/v1/embeddings", {"model": "embedder", "input": ["a", "a" * 100]})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert "text 1 has 100 tokens, over the 64" in reply.error["message"]
    document = embed(front, ["a" * 100], truncate=True)
    assert document["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": ["a", 5]}, "input", "not a mixture"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [[]]}, "input[0]", "length >= 1"),
        ({"input": [1000]}, "input", "outside the vocabulary"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid enum value"),
        ({"dimensions": 0}, "dimensions", ">= 1"),
        ({"pooling": "max"}, "pooling", "pooling"),
        ({"normalized": False}, "normalized", "length 1"),
        ({"prompt_name": "query"}, "prompt", "it has none"),
        ({"model": "chatty"}, None, "the model chatty makes no embeddings"),
        ({"model": "ranker"}, None, "the model ranker makes no embeddings: it makes scores"),
        ({"model": "nobody"}, "model", "does not exist"),
    ],
)
def test_wrong_input_is_refused_by_name(
    front: Front, fields: dict[str, object], param: str | None, told: str
) -> None:
    """With what to do instead."""
    reply = post(front, "/v1/embeddings", {"model": "embedder", "input": "a", **fields})
    assert reply.status in (400, 404), reply.body
    assert told in reply.error["message"]
    assert reply.error["param"] == param


def test_the_endpoint_of_text_embeddings_inference_gives_a_list_of_vectors(front: Front) -> None:
    """For every form of input; what it cannot do is refused by name."""
    ids = ids_of(front, "abc")
    expected = fake_vector(ids, WIDTH)
    for given in ("abc", ["abc"], ids, [ids]):
        reply = post(
            front, "/embed", {"model": "embedder", "inputs": given, "normalize": True, "truncate": False}
        )
        assert reply.status == 200, reply.body
        np.testing.assert_allclose(reply.json, [expected], atol=1e-7)
    cut = post(
        front, "/embed", {"model": "embedder", "inputs": ["a" * 100], "truncate": True, "dimensions": 5}
    )
    assert np.shape(cut.json) == (1, 5)
    for fields, told in (
        ({"inputs": "a" * 100}, "text 0 has 100 tokens, over the 64"),
        ({"inputs": ["a", 5]}, "inputs: a list holds"),
        ({"normalize": False}, "normalize is not supported by this server: embeddings always have length 1"),
        ({"truncation_direction": "Left"}, "a text is cut at its end"),
        ({"model": "ranker"}, "the model ranker makes no embeddings"),
    ):
        refused = post(front, "/embed", {"model": "embedder", "inputs": "a", **fields})
        assert refused.status == 400
        assert told in refused.error["message"]


def test_generating_with_a_model_that_only_ranks_is_a_400(front: Front) -> None:
    """And says what the model does."""
    reply = post(front, "/v1/completions", {"model": "ranker", "prompt": "a"})
    assert reply.status == 400
    assert "the model ranker generates no text" in reply.error["message"]


def scores(front: Front, query: str, documents: list[str]) -> list[float]:
    """The probabilities that the fake ranker's logits mean."""
    pairs = front.service.pool.model("ranker").tokenizer.encode_pairs(query, documents)
    return [probability(fake_vector(ids, 1, second=at, is_score=True).tolist()) for ids, at in pairs]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_gives_the_best_documents_first(front: Front, path: str) -> None:
    """In Jina's and Cohere's words; documents are texts or objects."""
    documents = [f"document {number}" for number in range(20)]
    expected = scores(front, "q", documents)
    given: list[object] = [documents[0], *({"text": text} for text in documents[1:])]
    body = {"model": "ranker", "query": "q", "documents": given, "top_n": 3, "return_documents": True}
    reply = post(front, path, body)
    assert reply.status == 200, reply.body
    best = sorted(range(20), key=lambda index: -expected[index])[:3]
    assert [result["index"] for result in reply.json["results"]] == best
    for result in reply.json["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-6)
        assert result["document"] == {"text": documents[result["index"]]}
    assert reply.json["meta"]["api_version"]["version"] == ("2" if path.startswith("/v2") else "1")
    assert reply.json["usage"]["total_tokens"] > 0


def test_rerank_with_texts_answers_as_text_embeddings_inference(front: Front) -> None:
    """A list of indices and scores, the best first."""
    texts = [f"document {number}" for number in range(9)]
    expected = sorted(enumerate(scores(front, "q", texts)), key=lambda pair: -pair[1])
    body = {"model": "ranker", "query": "q", "texts": texts, "return_text": True, "raw_scores": False}
    ranked = post(front, "/rerank", {**body, "truncate": True, "truncation_direction": "Right"}).json
    assert [each["index"] for each in ranked] == [index for index, _ in expected]
    np.testing.assert_allclose(
        [each["score"] for each in ranked], [score for _, score in expected], atol=1e-6
    )
    assert [each["text"] for each in ranked] == [texts[index] for index, _ in expected]


def test_wrong_rerank_input_is_refused_by_name(front: Front) -> None:
    """A model without scores says so."""
    for fields, told in (
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents: give documents"),
        ({"texts": ["a"]}, "not both"),
        ({"raw_scores": True}, "scores are from 0 to 1"),
        ({"query": None}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"rank_fields": ["a"]}, "rank_fields"),
        ({"model": "embedder"}, "the model embedder makes no scores: it is no reranker"),
    ):
        reply = post(front, "/v1/rerank", {"model": "ranker", "query": "q", "documents": ["a"], **fields})
        assert reply.status == 400
        assert told in reply.error["message"]


def test_ollamas_endpoints_give_vectors_in_its_words(front: Front) -> None:
    """What is too long is cut, as Ollama's clients expect, unless they say otherwise."""
    reply = post(front, "/api/embed", {"model": "embedder:latest", "input": ["abc", "a" * 100]})
    assert reply.status == 200, reply.body
    np.testing.assert_allclose(
        reply.json["embeddings"][0], fake_vector(ids_of(front, "abc"), WIDTH), atol=1e-7
    )
    assert reply.json["prompt_eval_count"] == 64 + len(ids_of(front, "abc"))
    refused = post(front, "/api/embed", {"model": "embedder", "input": "a" * 100, "truncate": False})
    assert refused.status == 400
    assert "over the 64" in refused.json["error"]
    old = post(front, "/api/embeddings", {"model": "embedder", "prompt": "abc"})
    assert old.json["embedding"] == reply.json["embeddings"][0]


def test_a_model_of_embeddings_alone_says_that_it_writes_no_text() -> None:
    """Ollama's programs choose models by what they can do."""
    config = FakeEngineConfig(dimensions=WIDTH, generates=False)
    with FakeWorker(config) as worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        wait_until(lambda: bool(front.service.pool.models()), "the model is known")
        assert post(front, "/api/show", {"model": "fake"}).json["capabilities"] == ["embedding"]


def test_a_client_that_leaves_stops_its_texts() -> None:
    """The worker computes no vector for nobody."""
    slow = FakeEngineConfig(dimensions=WIDTH, prefill_chunk=8, step_ms=10)
    with FakeWorker(slow) as worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:

        def numbers() -> Any:
            client = front.service.pool.workers[0].client
            return asyncio.run_coroutine_threadsafe(client.status(), front.loop).result(60).numbers

        body = b'{"input": [' + b",".join([b'"some text"'] * 3000) + b"]}"
        connection = socket.create_connection(("127.0.0.1", front.port))
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: numbers()["running"], "the texts run")
        connection.close()
        wait_until(lambda: not numbers()["running"] and not numbers()["queued"], "nothing runs")
        assert numbers()["vectors"] < 3000


def test_others_are_answered_while_a_long_response_is_written(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floats become text in a thread, which waits here until the event loop has answered somebody else."""
    writing, answered = threading.Event(), threading.Event()

    def held_floats(vector: np.ndarray) -> msgspec.Raw:
        writing.set()
        assert answered.wait(START_S)
        return floats_of(vector)

    monkeypatch.setattr(embeddings, "floats_of", held_floats)
    count = embeddings.FLOATS_AT_ONCE // WIDTH + 1
    with ThreadPoolExecutor(1) as threads:
        body = {"model": "embedder", "input": ["some text"] * count}
        long = threads.submit(post, front, "/v1/embeddings", body)
        assert writing.wait(START_S)
        assert get(front, "/health").status == 200
        answered.set()
        assert len(long.result().json["data"]) == count


def test_no_call_writes_more_than_one_vector_as_text() -> None:
    """It keeps the GIL: one call for 100,000 vectors stopped the event loop for three seconds, from the thread too."""
    vectors = np.array([[1.5, 2.0], [0.25, 4.0]], np.float32)
    assert [floats_of(vector) for vector in vectors] == [
        msgspec.Raw(b"[1.5,2.0]"),
        msgspec.Raw(b"[0.25,4.0]"),
    ]
    written = msgspec.json.decode(embeddings_document(Embedded(vectors, 3), "m", "float"))
    assert [each["embedding"] for each in written["data"]] == vectors.tolist()


# --- the clients of others -----------------------------------------------------------------------------------------


@pytest.mark.process
def test_openai_python_reads_both_encodings(front: Front) -> None:
    """Sync and async; base64 is what it asks for by itself."""
    openai = pytest.importorskip("openai")
    expected = fake_vector(ids_of(front, "abc"), WIDTH)
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model="embedder", input=["abc", "d"])
        as_floats = client.embeddings.create(model="embedder", input="abc", encoding_format="float")
        short = client.embeddings.create(model="embedder", input="abc", dimensions=4)
        with pytest.raises(openai.BadRequestError, match="over the 64"):
            client.embeddings.create(model="embedder", input="a" * 100)
    np.testing.assert_allclose(by_default.data[0].embedding, expected, atol=1e-7)
    np.testing.assert_allclose(as_floats.data[0].embedding, expected, atol=1e-7)
    assert len(short.data[0].embedding) == 4
    type(by_default).model_validate(by_default.model_dump(), strict=True)

    async def ask() -> list[float]:
        async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
            return (await client.embeddings.create(model="embedder", input="abc")).data[0].embedding

    np.testing.assert_allclose(asyncio.run(ask()), expected, atol=1e-7)


@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed"
)
def test_langchain_embeds_documents_and_queries(front: Front) -> None:
    """With texts; by default it sends the token ids of OpenAI's own tokenizer."""
    from langchain_openai import OpenAIEmbeddings
    from pydantic import SecretStr

    client = OpenAIEmbeddings(
        model="embedder",
        base_url=front.url + "/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,
    )
    made = client.embed_documents(["abc", "d"])
    np.testing.assert_allclose(made[0], fake_vector(ids_of(front, "abc"), WIDTH), atol=1e-7)
    np.testing.assert_allclose(client.embed_query("abc"), made[0], atol=1e-7)


@pytest.mark.slow
@wanted
@pytest.mark.parametrize(
    ("program", "environment"),
    [
        ("embedding_checks.py", "embeddings"),
        ("embedding_checks.py", "retrieval"),
        ("openai_node_embeddings.mjs", ""),
    ],
)
def test_a_program_of_others_works(front: Front, program: str, environment: str, tmp_path: Path) -> None:
    """Cohere, litellm, llama-index, haystack, chromadb, qdrant and openai-node, in environments of their own."""
    results = results_of(program, front.url, environment=environment, scratch=tmp_path)
    assert len(results) >= 3
    assert not {result["name"]: result["error"] for result in results if result["error"]}


KEYS = ("first-long-key", "other-long-key")
ENDPOINTS = {
    "/v1/embeddings": "input",
    "/embed": "inputs",
    "/api/embed": "input",
    "/api/embeddings": "prompt",
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Client]]:
    """A front-end with keys on a decoder, whose beginnings of texts stay in the prefix cache."""
    directory = tmp_path_factory.mktemp("decoder") / "m"
    directory.mkdir()
    write(directory, case("qwen3-last"))
    with (
        WorkerProcess(None, model=str(directory), supervise=False, cache_scope="key") as worker,
        worker.client() as client,
    ):
        client.wait_ready()
        with serving(HttpConfig(workers=(worker.address,), api_keys=KEYS)) as front:
            wait_until(lambda: len(front.service.pool.models()) == 1, "the model is known")
            yield front, client


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_key_goes_on_from_its_own_texts_alone(decoder: tuple[Front, Client], path: str) -> None:
    """The time and the cached tokens of a vector tell another key nothing of a text whose beginning it has guessed."""
    front, client = decoder
    first = [*ENDPOINTS].index(path) * 20
    beginning = " ".join(f"w{id_}" for id_ in range(first, first + 20))

    def cached(key: str, end: int, **fields: object) -> int:
        before = client.status().numbers
        body = {"model": "m", ENDPOINTS[path]: f"{beginning} w{80 + end} w1", **fields}
        reply = post(front, path, body, authorization=f"Bearer {key}")
        assert reply.status == 200, reply.body
        # The reply leaves before the worker's numbers are written.
        wait_until(lambda: client.status().numbers["vectors"] > before["vectors"], "the vector is counted")
        return int(client.status().numbers["cached_tokens"] - before["cached_tokens"])

    # A beginning is kept when a second text has it.
    assert [cached(KEYS[0], end) for end in range(3)] == [0, 0, 20]
    assert [cached(KEYS[1], end) for end in range(3, 6)] == [0, 0, 20]
    if not path.startswith("/api"):
        assert [cached(key, end, cache_scope="shared") for key in KEYS for end in range(2)] == [0, 0, 20, 20]
