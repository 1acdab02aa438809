"""/metrics and /status of a front-end, against a worker that did a known amount of work."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.http.front import Front, chat, get, post, serving, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(front: Front, **headers: str) -> Samples:
    """Samples by name and labels, those of worker and model left out."""
    reply = get(front, "/metrics", **headers)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    ours = {"worker", "model_name", "engine"}
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k not in ours)): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def test_a_known_request_is_counted_by_the_front_end_and_by_the_worker(front: Front) -> None:
    """One chat of 9 tokens, and one that is refused."""
    before = scrape(front)
    assert post(front, "/v1/chat/completions", chat(max_tokens=9, seed=1, ignore_eos=True)).status == 200
    assert post(front, "/v1/chat/completions", chat(max_tokens=0)).status == 400
    ended = ("zmqengine_requests_ended_total", frozenset({("cause", "length")}))
    wait_until(lambda: scrape(front).get(ended, 0) > before.get(ended, 0), "the worker told the end")
    after = scrape(front)

    def grown(name: str, **labels: str) -> float:
        key = name, frozenset(labels.items())
        return after[key] - before.get(key, 0)

    path = "/v1/chat/completions"
    assert grown("zmqengine_http_requests_total", path=path, status="200") == 1
    assert grown("zmqengine_http_requests_total", path=path, status="400") == 1
    assert grown("zmqengine_http_request_seconds_count", path=path) == 2
    assert after["zmqengine_http_requests_running", frozenset({("path", path)})] == 0
    assert grown("zmqengine_tokens_total", kind="generated") == 9
    assert grown("zmqengine_inter_token_seconds_count") == 8
    assert grown("vllm:time_to_first_token_seconds_count") == 1


def test_paths_that_are_made_up_do_not_become_labels(front: Front) -> None:
    """Else anybody could make the scraper's store grow without bound."""
    for number in range(3):
        assert get(front, f"/made/up/{number}").status == 404
    paths = {dict(labels).get("path") for _, labels in scrape(front)}
    assert not [path for path in paths if path and "made" in path]


def test_status_tells_what_the_page_shows(front: Front) -> None:
    """Numbers, memory by part and the sessions of every worker."""
    (worker,) = get(front, "/status").json["workers"]
    assert (worker["state"], worker["model"]) == ("ready", "fake")
    assert worker["memory"]["limit"] > 0
    assert [session["client"] for session in worker["sessions"]] == ["zmqengine http"]


def test_with_keys_neither_is_open_and_nobody_sees_the_others() -> None:
    """Names of requests and front-ends are told only where there is nobody to tell apart."""
    with FakeWorker(FakeEngineConfig()) as worker:
        config = HttpConfig(workers=(worker.address,), probe_ms=200, api_keys=("secret-key",))
        with serving(config) as front:
            assert get(front, "/metrics").status == get(front, "/status").status == 401
            key = {"authorization": "Bearer secret-key"}
            assert scrape(front, **key)
            (told,) = get(front, "/status", **key).json["workers"]
            assert told["numbers"]["passes"] >= 0
            assert (told["sessions"], told["requests"]) == ([], [])


def test_a_dead_worker_is_silent_and_the_front_end_answers_on() -> None:
    """Each scrape waits for no more than the answer's bound."""
    worker = FakeWorker(FakeEngineConfig(), process=True)
    with worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        # On a busy machine any answer may take longer than a scrape waits.
        wait_until(lambda: scrape(front)["zmqengine_up", frozenset()] == 1, "it is not up")
        worker.kill()
        assert scrape(front)["zmqengine_up", frozenset()] == 0
        assert get(front, "/status").json["workers"][0]["state"] == "silent"
