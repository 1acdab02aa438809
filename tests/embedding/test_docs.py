"""The page about embeddings says what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.http.front import serving, wait_until
from tests.support.workers import WorkerProcess
from zmqengine.checkpoint.recipe import FAMILIES
from zmqengine.worker.main import TEXTS_MAX
from zmqengine_client import Client
from zmqengine_http import HttpConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "embeddings.md"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a worker of the bundled model."""
    with WorkerProcess(None, model="pico-embed", supervise=False) as worker:
        # A program without a time to wait for a worker fails where none listens yet.
        worker.wait_ready()
        yield worker.address


def test_the_search_runs_without_a_network_and_finds_what_is_meant(address: str) -> None:
    """As it stands on the page, with the bundled model."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ZMQENGINE_ADDRESS": address, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 3
    assert "kite" in lines[0]
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] - scores[1] > 0.1


def test_the_client_of_hugging_face_gets_the_vectors_of_the_bundled_model(address: str) -> None:
    """By the endpoint of text-embeddings-inference, which sentence-transformers' clients of servers use."""
    texts = ["A rabbit lost her blue kite.", "They baked a cake."]
    with Client(address) as client:
        expected = client.embed(texts)
    with serving(HttpConfig(workers=(address,), probe_ms=200)) as front:
        wait_until(lambda: bool(front.service.pool.models()), "the model is known")
        client_of_hub = InferenceClient(model=f"{front.url}/embed")
        made = client_of_hub.feature_extraction(
            texts, normalize=True, truncate=True, truncation_direction="right"
        )
        alone = client_of_hub.feature_extraction(texts[0], dimensions=64)
        with pytest.raises(HfHubHTTPError, match="length 1"):
            client_of_hub.feature_extraction(texts, normalize=False)
    np.testing.assert_allclose(made, expected, atol=1e-6)
    short = expected[:1, :64] / np.linalg.norm(expected[0, :64])
    np.testing.assert_allclose(alone, short, atol=1e-6)


def test_the_page_names_every_family_and_the_limit() -> None:
    """A family that is added is told of."""
    text = PAGE.read_text(encoding="utf-8").lower().replace("-", "")
    assert all(family.replace("-", "") in text for family in FAMILIES)
    assert f"messages of up to {TEXTS_MAX}" in text
