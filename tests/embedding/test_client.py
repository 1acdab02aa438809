"""`embed` and `rerank` of both halves of the client, on real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.embedding.checkpoints import case, write
from tests.support.workers import WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.fake.fake_vectors import fake_vector
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient, Client
from zmqengine_client.aio import waiting
from zmqengine_client.errors import BadRequest, ContextExceeded, DeadlineExceeded
from zmqengine_client.text import long_texts
from zmqengine_client.text.reranking import probability, question
from zmqengine_client.text.text_source import source_of
from zmqengine_client.text.tokenizer import Tokenizer as TextTokenizer

WIDTH = 24
CONFIG = FakeEngineConfig(dimensions=WIDTH, prefill_chunk=64)


def texts(count: int) -> list[list[int]]:
    """Token ids of different texts."""
    return [[1 + index % 900, *range(2, 2 + index % 7)] for index in range(count)]


def expect_own(vectors: np.ndarray, given: list[list[int]]) -> None:
    """Each text has its own vector."""
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.stack([fake_vector(text, WIDTH) for text in given]))


def test_many_texts_go_in_several_messages_and_come_back_in_order() -> None:
    """With progress, and of a worker that takes 256 at once."""
    seen: list[tuple[int, int]] = []
    given = texts(1500)
    with FakeWorker(CONFIG) as worker, Client(worker.address) as client:
        expect_own(client.embed(given, on_progress=lambda done, total: seen.append((done, total))), given)
        numbers = client.status().numbers
    assert numbers["vectors"] == 1500
    assert seen[-1] == (1500, 1500)
    assert len(seen) >= 1500 / 256
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_the_asynchronous_half_does_the_same() -> None:
    """Several calls at once, each with its own texts."""

    async def run() -> None:
        async with AsyncClient(worker.address) as client:
            given = [texts(300), texts(5), texts(70)]
            made = await asyncio.gather(*(client.embed(each) for each in given))
            for vectors, each in zip(made, given, strict=True):
                expect_own(vectors, each)
            assert (await client.embed([])).shape == (0, WIDTH)
            assert (await client.embed(given[1], dimensions=3)).shape == (5, 3)

    with FakeWorker(CONFIG) as worker:
        asyncio.run(run())


def test_text_is_tokenized_with_the_models_tokenizer() -> None:
    """A list may hold texts and token ids; a mixture keeps its order."""
    with FakeWorker(CONFIG) as worker, Client(worker.address) as client:
        ids = client.tokenizer().encode("abc")
        expect_own(client.embed(["abc", [7, 8], "abc"]), [ids, [7, 8], ids])
        with pytest.raises(BadRequest, match="no prompt 'query'; it has none"):
            client.embed(["a"], prompt="query")


def test_the_default_prompt_of_a_model_goes_before_texts() -> None:
    """As sentence-transformers does it; a name or an empty one takes another, or none."""
    with FakeWorker(CONFIG) as worker, Client(worker.address) as client:
        tokenizer = client.tokenizer()
    tokenizer.facts = {"default_prompt": "query", "prompt_query": "ab", "prompt_document": "d"}
    plain = tokenizer.encode_all(["abc", "dc", "c"])
    for prompt, expected in ((None, plain[0]), ("document", plain[1]), ("", plain[2])):
        assert [each.ids for each in source_of(["c", [7]], prompt).encode(tokenizer, 0, 2, 99)] == [
            expected,
            [7],
        ]


def test_a_worker_that_is_killed_costs_no_vector() -> None:
    """Vectors that came are not computed again; the rest goes to the worker that comes back."""
    given = texts(1000)
    with (
        WorkerProcess(FakeEngineConfig(dimensions=WIDTH, prefill_chunk=64, step_ms=5)) as worker,
        worker.client() as client,
    ):
        done: list[int] = []

        def kill_once(count: int, _: int) -> None:
            done.append(count)
            if len(done) == 1:
                worker.kill_engine()

        # On a busy machine all may be there before the kill: then the next call finds that the worker was gone.
        while not client.counters.resumed_streams:
            done.clear()
            expect_own(client.embed(given, on_progress=kill_once), given)
            assert done == sorted(set(done)), "a vector came twice"
            assert done[-1] == 1000


def test_lost_frames_cost_no_vector() -> None:
    """A gap shows, and resume fills it."""
    given = texts(600)
    with FakeWorker(CONFIG, fault_drop_frames=0.3) as worker, Client(worker.address) as client:
        expect_own(client.embed(given), given)
        assert client.counters.frames_lost > 0


def test_a_task_that_is_cancelled_aborts_its_texts() -> None:
    """The worker stops: nobody wants them."""

    async def run() -> None:
        async with AsyncClient(worker.address) as client:
            task = asyncio.create_task(client.embed(texts(5000)))
            while not (await client.status()).numbers["running"]:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await client.status()).numbers["running"]:
                await asyncio.sleep(0.01)
            assert (await client.status()).numbers["vectors"] < 2000

    with FakeWorker(FakeEngineConfig(dimensions=WIDTH, prefill_chunk=8, step_ms=5)) as worker:
        asyncio.run(asyncio.wait_for(run(), 60))


def test_a_queue_that_is_full_is_waited_for() -> None:
    """A flood is batch work: it does not fail because another front-end came first."""
    given = texts(1200)
    with (
        FakeWorker(FakeEngineConfig(dimensions=WIDTH, rows_max=1, step_ms=2), queue_max=3) as worker,
        Client(worker.address) as one,
    ):
        expect_own(one.embed(given), given)
        assert one.metrics().count("rejected") > 0


def test_a_text_that_is_too_long_is_refused_or_cut() -> None:
    """Never in silence; cut before the special tokens of the end."""
    with (
        FakeWorker(FakeEngineConfig(dimensions=WIDTH, context_tokens=20)) as worker,
        Client(worker.address) as client,
    ):
        with pytest.raises(ContextExceeded, match="text 1 has 21 tokens, over the 20") as raised:
            client.embed([[5], [5] * 21])
        assert raised.value.text == 1
        expect_own(client.embed([[5], [5] * 21], truncate=True), [[5], [5] * 20])


def test_what_the_model_cannot_read_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 8 MB took 1.2 GB, and a query of 30 KB with 1,000 documents a minute: it was tokenized for each."""
    characters: list[int] = []
    encode_batch, encode_pairs = TextTokenizer._encode_batch, TextTokenizer.encode_pairs

    def counted_batch(self: TextTokenizer, given: list[str], special: bool) -> list[list[int]]:
        characters.append(sum(map(len, given)))
        return encode_batch(self, given, special)

    def counted_pairs(self: TextTokenizer, first: str, others: Sequence[str]) -> list[tuple[list[int], int]]:
        characters.append(sum(len(first) + len(other) for other in others))
        return encode_pairs(self, first, others)

    monkeypatch.setattr(TextTokenizer, "_encode_batch", counted_batch)
    monkeypatch.setattr(TextTokenizer, "encode_pairs", counted_pairs)
    long = "ab " * 1_000_000
    both = FakeEngineConfig(dimensions=WIDTH, labels=1, context_tokens=200)
    with FakeWorker(both) as worker, Client(worker.address) as client:
        with pytest.raises(ContextExceeded, match=r"text 1 has over [0-9]+ tokens, over the 200 that"):
            client.embed(["a", long])
        cut = client.embed([long, long[:300]], truncate=True)
        np.testing.assert_array_equal(cut[0], cut[1])
        with pytest.raises(ContextExceeded, match="text 0 has over"):
            client.rerank("who", [long])
        with pytest.raises(
            ContextExceeded, match=r"the query has over .* leaves no room for a document among the 200"
        ):
            client.rerank(long, ["a"] * 1000)
        assert sum(characters) < len(long) / 2
        characters.clear()
        assert (
            client.embed([f"text {number} " * 10 for number in range(3000)], truncate=True).shape[0] == 3000
        )
        assert len(client.rerank("w" * 150, ["a"] * 1000)) == 1000
        assert max(characters) <= long_texts.CHARACTERS, "a call for many texts takes bounded memory"


def test_a_deadline_and_wrong_options_are_errors() -> None:
    """Of the first message that meets them."""
    with (
        FakeWorker(FakeEngineConfig(dimensions=WIDTH, prefill_chunk=4, step_ms=20)) as worker,
        Client(worker.address) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            client.embed(texts(200), deadline_ms=50)
        with pytest.raises(BadRequest, match="dimensions"):
            client.embed(texts(2), dimensions=0)
        with pytest.raises(BadRequest, match="dimensions: 25 are more than the 24"):
            client.embed(texts(2), dimensions=25)
        with pytest.raises(BadRequest, match="makes no scores: it is no reranker"):
            client.rerank("a", ["b"])


def test_one_text_in_place_of_a_list_is_refused() -> None:
    """Its characters, and the numbers of bytes, would be read as texts and token ids, and give vectors too."""
    with FakeWorker(CONFIG) as worker, Client(worker.address) as client:
        for given in ("a rabbit", b"a rabbit"):
            with pytest.raises(BadRequest, match="texts: a list of texts is wanted"):
                client.embed(given)  # type: ignore[arg-type]
            with pytest.raises(BadRequest, match="documents: a list of texts is wanted"):
                client.rerank("who", given)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="bytes are none"):
            client.embed([b"a rabbit"])
        with pytest.raises(BadRequest, match="text 1 is not a list of token ids"):
            client.embed(["a rabbit", 5])  # type: ignore[list-item]


def test_an_unknown_option_of_texts_is_refused_by_name() -> None:
    """A misspelt `dimensions` would give whole vectors."""
    with FakeWorker(CONFIG) as worker, Client(worker.address) as client:
        with pytest.raises(TypeError, match=r"unexpected option 'dimension'; the options are priority"):
            client.embed(texts(2), dimension=8)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"unexpected option 'top_n'"):
            client.rerank("who", ["a rabbit"], top_n=1)  # type: ignore[call-arg]


def test_a_model_without_vectors_says_so() -> None:
    """Before anything is sent."""
    with (
        FakeWorker(FakeEngineConfig(name="chatty")) as worker,
        Client(worker.address) as client,
        pytest.raises(BadRequest, match="the model chatty makes no embeddings"),
    ):
        client.embed(["a"])


def test_rerank_puts_documents_in_order_by_the_scores_of_a_head() -> None:
    """The query goes with each document as a pair of the tokenizer."""
    with FakeWorker(FakeEngineConfig(labels=1, generates=False)) as worker, Client(worker.address) as client:
        documents = [f"document {number}" for number in range(40)]
        ranked = client.rerank("a query", documents)
        pairs = client.tokenizer().encode_pairs("a query", documents)
    expected = [
        probability(fake_vector(ids, 1, second=second, is_score=True).tolist()) for ids, second in pairs
    ]
    assert [each.index for each in ranked] == sorted(range(40), key=lambda index: -expected[index])
    for each in ranked:
        assert each.score == pytest.approx(expected[each.index], abs=1e-6)


def test_a_model_that_is_asked_scores_by_its_two_answers(tmp_path: Path) -> None:
    """The score is the softmax of yes and no alone, as in Qwen3-Reranker's model card."""
    directory = tmp_path / "tiny-Qwen3-Reranker"
    directory.mkdir()
    given = case("qwen3-last")
    given["pooling"] = None
    write(directory, given)
    words = ["yes", "no", "the", "cat", "sat", "dog", "what"]
    vocabulary = {word: index for index, word in enumerate(words)} | {
        f"w{index}": index for index in range(len(words), 90)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w89"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    documents = ["the cat sat", "the dog", "cat dog cat"]
    with (
        WorkerProcess(None, model=str(directory), supervise=False) as worker,
        worker.client() as client,
    ):
        ranked = {each.index: each.score for each in client.rerank("what cat", documents)}
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    for index, document in enumerate(documents):
        ids = [id_ for part in question("what cat", document, None) for id_ in tokenizer.encode(part).ids]
        logits = model(mx.array([ids]))[0, -1]
        wanted = mx.softmax(logits[:2])[0].item()
        assert ranked[index] == pytest.approx(wanted, abs=1e-4)


def noted_threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that the client calls in a thread from now on."""
    used: list[object] = []
    in_thread = asyncio.to_thread

    async def noted(function: Any, *args: Any) -> Any:
        used.append(function)
        return await in_thread(function, *args)

    monkeypatch.setattr(waiting, "off_loop", noted)
    return used


@pytest.mark.parametrize(("characters", "threads"), [(400, 0), (4000, 1)])
def test_a_short_text_waits_for_no_thread(
    characters: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one is tokenized in one, as the loop has others to serve."""

    async def run() -> None:
        async with AsyncClient(worker.address) as client:
            await client.embed(["warm up"])
            used = noted_threads(monkeypatch)
            assert (await client.embed(["a " * (characters // 2)], truncate=True)).shape == (1, WIDTH)
            assert len(used) == threads

    with FakeWorker(CONFIG) as worker:
        asyncio.run(run())


def test_texts_of_known_words_wait_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are expected after others of known words; the first ones after another script are tokenized in a thread."""

    async def run() -> None:
        async with AsyncClient(worker.address) as client:
            await client.embed(["warm up"])
            used = noted_threads(monkeypatch)
            for text, threads in (
                ("\u044f ", 0),
                ("a cat ", 1),
                ("a Cat ", 0),
                ("\u044f ", 0),
                ("a cat ", 1),
            ):
                used.clear()
                await client.embed([text * 40] * 16)
                assert len(used) == threads, text

    with WorkerProcess(None, model="pico-embed", supervise=False) as worker:
        worker.wait_ready()
        asyncio.run(run())
