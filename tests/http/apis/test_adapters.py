"""An adapter by the name of its model, in all APIs, the client and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="a worker needs it; a front-end runs without")

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.http.front import Front, get, post, serving
from tests.support.workers import WorkerProcess
from zmqengine.pico import model_path
from zmqengine_client import Client, YesNo
from zmqengine_client.errors import BadRequest
from zmqengine_http import HttpConfig

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about a cat."}]
MODEL = "pico-tools"


def write_adapter(directory: Path) -> Path:
    """A random adapter of the bundled model that changes what it says."""
    model = load(str(model_path(MODEL)))[0]
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
    linear_to_lora_layers(model, 4, config)
    mx.random.seed(1)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    arrays = {
        path: 0.2 * mx.random.normal(array.shape)
        for path, array in parameters.items()
        if path.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), arrays)
    (directory / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": config})
    )
    return directory


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker of the bundled model with one adapter."""
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"))
    with WorkerProcess(None, model=MODEL, supervise=False, adapter=(f"odd={adapter}",)) as worker:
        yield worker


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    """A front-end on that worker."""
    with serving(HttpConfig(workers=(worker.address,), probe_ms=200, default_temperature=0)) as front:
        yield front


@pytest.fixture(scope="module")
def texts(worker: WorkerProcess) -> dict[str, str]:
    """What the model says without and with the adapter, by the client."""
    with worker.client() as client:
        options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0}
        said = {name: client.chat(ASKED, adapter=name, **options).text() for name in ("", "odd")}
        # As beside each other, and from the prefix cache.
        streams = [(name, client.chat(ASKED, adapter=name, **options)) for name in ("odd", "", "odd")]
        assert [stream.text() for _, stream in streams] == [said[name] for name, _ in streams]
    assert said[""] != said["odd"]
    return said


def spoken(front: Front, path: str, body: dict[str, Any]) -> str:
    """The text of an answer in any of the APIs."""
    reply = post(front, path, body)
    assert reply.status == 200, reply.body
    answer = reply.json
    if path == "/v1/chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    if path == "/v1/responses":
        return str(answer["output"][0]["content"][0]["text"])
    if path == "/v1/messages":
        return str(answer["content"][0]["text"])
    return str(answer["message"]["content"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 20}),
        ("/v1/responses", {"input": ASKED[0]["content"], "max_output_tokens": 20}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 20}),
        ("/api/chat", {"messages": ASKED, "stream": False, "options": {"num_predict": 20}}),
    ],
)
def test_each_api_names_the_adapter_behind_its_model(
    front: Front, texts: dict[str, str], path: str, body: dict[str, Any]
) -> None:
    """With the text that the client gets."""
    assert spoken(front, path, {**body, "model": f"{MODEL}:odd"}) == texts["odd"]
    assert spoken(front, path, {**body, "model": MODEL}) == texts[""]


def test_the_list_of_models_has_it(front: Front) -> None:
    """As a model with a parent; one that is not there is a 404."""
    cards = {card["id"]: card for card in get(front, "/v1/models").json["data"]}
    assert set(cards) == {MODEL, f"{MODEL}:odd"}
    assert cards[f"{MODEL}:odd"]["parent"] == MODEL
    assert get(front, f"/v1/models/{MODEL}:odd").status == 200
    reply = post(front, "/v1/chat/completions", {"model": f"{MODEL}:even", "messages": ASKED})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_scores_of_prompts_and_decisions_are_the_adapters(front: Front, worker: WorkerProcess) -> None:
    """As every other request."""
    asked = {"prompt": "Tom is", "echo": True, "logprobs": 0, "max_tokens": 0}
    scores = [post(front, "/v1/completions", {**asked, "model": name}) for name in (MODEL, f"{MODEL}:odd")]
    first, second = (reply.json["choices"][0]["logprobs"]["token_logprobs"] for reply in scores)
    assert first != second
    body = {"state": "Tom is glad.", "questions": {"q": {"type": "yes_no", "instructions": "Is he?"}}}
    decided = post(front, "/v1/decisions", {**body, "model": f"{MODEL}:odd"}).json["answers"]["q"][
        "probability"
    ]
    with worker.client() as client:
        questions = {"q": YesNo(instructions="Is he?")}
        assert decided == pytest.approx(
            client.decide("Tom is glad.", questions, adapter="odd").answers["q"].yes, rel=1e-4
        )
        assert decided != pytest.approx(client.decide("Tom is glad.", questions).answers["q"].yes, rel=1e-3)


def test_an_adapter_that_is_not_there_is_refused(worker: WorkerProcess) -> None:
    """By its name, with those that are there."""
    with Client(worker.address) as client, pytest.raises(BadRequest, match="no 'even', it has odd"):
        client.generate("a", adapter="even").text()


def test_the_command_line_takes_it(worker: WorkerProcess) -> None:
    """As an option of a generation."""
    outputs = []
    for extra in ([], ["--adapter", "odd"]):
        command = [
            sys.executable,
            "-m",
            "zmqengine.cli.main",
            "generate",
            "-w",
            worker.address,
            "Tom has",
            "-n",
            "12",
        ]
        ended = subprocess.run([*command, *extra], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        outputs.append(ended.stdout)
    assert outputs[0] != outputs[1]


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY, OPERATOR = "a-callers-key", "an-operators-key"


def sent(front: Front, path: str, key: str = "", **body: Any) -> Any:
    """The reply to a caller with a key."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return post(front, path, body, **headers)


def test_adapters_come_and_go_by_vllms_paths(worker: WorkerProcess, tmp_path: Path) -> None:
    """From directories below one that the operator names; a request may have one as soon as its load is answered."""
    (tmp_path / "allowed" / "new").mkdir(parents=True)
    write_adapter(tmp_path / "allowed" / "new")
    (tmp_path / "outside").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")
    worker.wait_ready()
    # Nothing but the load itself tells the front-end.
    config = HttpConfig(
        workers=(worker.address,),
        probe_ms=60_000,
        default_temperature=0,
        adapter_dir=str(tmp_path / "allowed"),
    )
    asked = {"messages": ASKED, "max_tokens": 20}
    with serving(config) as front:
        for path in ("../outside", str(tmp_path / "outside"), "link", ".", "/"):
            reply = sent(front, LOAD, lora_name="new", lora_path=path)
            assert (reply.status, reply.error["code"]) == (403, "not_authorized"), path
        reply = sent(front, LOAD, lora_name="new", lora_path="missing")
        assert (reply.status, reply.error["code"]) == (400, "model_load")
        for body in ({"lora_name": "a:b"}, {"lora_name": ""}, {"lora_name": "new", "load_inplace": True}):
            assert sent(front, LOAD, lora_path="new", **body).status == 400
        try:
            reply = sent(front, LOAD, lora_name="new", lora_path="new")
            assert (reply.status, reply.json["id"]) == (200, f"{MODEL}:new")
            assert sent(front, LOAD, lora_name="new", lora_path="new").status == 200
            said = spoken(front, "/v1/chat/completions", {**asked, "model": f"{MODEL}:new"})
            assert said == spoken(front, "/v1/chat/completions", {**asked, "model": f"{MODEL}:odd"})
            assert said != spoken(front, "/v1/chat/completions", {**asked, "model": MODEL})
        finally:
            reply = sent(front, UNLOAD, lora_name="new", model=MODEL)
        assert reply.status == 200
        assert sent(front, UNLOAD, lora_name="new").status == 404
        assert post(front, "/v1/chat/completions", {**asked, "model": f"{MODEL}:new"}).status == 404


def test_who_may_load_adapters(worker: WorkerProcess, tmp_path: Path) -> None:
    """Where there are operators' keys, those alone, from any directory; without such keys and without a directory of
    adapters no request."""
    directory = str(write_adapter(tmp_path))
    with serving(HttpConfig(workers=(worker.address,))) as front:
        assert sent(front, LOAD, lora_name="new", lora_path=directory).status == 403
    config = HttpConfig(workers=(worker.address,), api_keys=(KEY,), operator_keys=(OPERATOR,))
    with serving(config) as front:
        for path in (LOAD, UNLOAD):
            assert sent(front, path, KEY, lora_name="odd", lora_path=directory).status == 403
        assert sent(front, LOAD, OPERATOR, lora_name="new", lora_path="relative").status == 400
        assert sent(front, LOAD, OPERATOR, lora_name="new", lora_path=directory).status == 200
        assert sent(front, UNLOAD, OPERATOR, lora_name="new").status == 200
