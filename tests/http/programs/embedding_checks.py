"""Clients of embeddings and rerank against a front-end: python embedding_checks.py URL, one JSON line a check.

What is not installed is passed over.
"""

# mypy: ignore-errors
import json
import os
import sys
import traceback

# litellm waits for a list of prices from the network, three times, when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

URL = sys.argv[1]
TEXTS = ["abc", "something else", "abc"]
DOCUMENTS = ["one", "two", "three"]


def check_vectors(vectors):
    assert len(vectors) == len(TEXTS), len(vectors)
    assert all(len(vector) == 24 for vector in vectors)
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True)) < 1e-6
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[1], strict=True)) > 1e-3


def check_ranked(results, index, score):
    scores = [score(result) for result in results]
    assert scores == sorted(scores, reverse=True), scores
    assert {index(result) for result in results} <= {0, 1, 2}


def openai_python():
    import openai

    client = openai.OpenAI(base_url=URL + "/v1", api_key="none")
    check_vectors([each.embedding for each in client.embeddings.create(model="embedder", input=TEXTS).data])


def langchain():
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(
        model="embedder", base_url=URL + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    check_vectors(made.embed_documents(TEXTS))


def llama_index():
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    made = OpenAILikeEmbedding(model_name="embedder", api_base=URL + "/v1", api_key="none")
    check_vectors(made.get_text_embedding_batch(TEXTS))
    assert len(made.get_query_embedding("abc")) == 24


def litellm_embedding():
    import litellm

    made = litellm.embedding(model="openai/embedder", input=TEXTS, api_base=URL + "/v1", api_key="none")
    check_vectors([each["embedding"] for each in made.data])
    for provider, base in (("hosted_vllm", URL + "/v1"), ("jina_ai", URL + "/v1")):
        made = litellm.embedding(model=f"{provider}/embedder", input=TEXTS, api_base=base, api_key="none")
        check_vectors([each["embedding"] for each in made.data])


def litellm_rerank():
    import litellm

    for provider, base in (
        ("hosted_vllm", URL),
        ("jina_ai", URL + "/v1/rerank"),
        ("cohere", URL + "/v1/rerank"),
    ):
        made = litellm.rerank(
            model=f"{provider}/ranker", query="q", documents=DOCUMENTS, top_n=2, api_base=base, api_key="none"
        )
        assert len(made.results) == 2
        check_ranked(made.results, lambda each: each["index"], lambda each: each["relevance_score"])


def cohere_client():
    import cohere

    for make in (cohere.Client, cohere.ClientV2):
        made = make(api_key="none", base_url=URL).rerank(
            model="ranker", query="q", documents=DOCUMENTS, top_n=2
        )
        assert len(made.results) == 2
        check_ranked(made.results, lambda each: each.index, lambda each: each.relevance_score)


def langchain_cohere():
    import cohere
    from langchain_cohere import CohereRerank

    client = cohere.ClientV2(api_key="none", base_url=URL)
    made = CohereRerank(client=client, model="ranker", cohere_api_key="none").rerank(DOCUMENTS, "q", top_n=2)
    check_ranked(made, lambda each: each["index"], lambda each: each["relevance_score"])


def langchain_jina():
    from langchain_community.document_compressors import jina_rerank

    # The class has no parameter for the address.
    jina_rerank.JINA_API_URL = URL + "/v1/rerank"
    client = jina_rerank.JinaRerank(jina_api_key="none", model="ranker")
    made = client.rerank(DOCUMENTS, "q", top_n=2)
    assert len(made) == 2
    check_ranked(made, lambda each: each["index"], lambda each: each["relevance_score"])


def hugging_face():
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=URL + "/only/embedder/embed")
    check_vectors(client.feature_extraction(TEXTS, normalize=True, truncate=True).tolist())


def llama_index_tei():
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    check_vectors(
        TextEmbeddingsInference(
            model_name="embedder", base_url=URL + "/only/embedder", text_instruction="", query_instruction=""
        ).get_text_embedding_batch(TEXTS)
    )
    nodes = [NodeWithScore(node=TextNode(text=document, id_=document)) for document in DOCUMENTS]
    client = TextEmbeddingInference(base_url=URL + "/only/ranker", top_n=2)
    made = client.postprocess_nodes(nodes, QueryBundle("q"))
    assert len(made) == 2
    check_ranked(made, lambda each: DOCUMENTS.index(each.node.id_), lambda each: each.score)


def haystack_tei():
    from haystack import Document
    from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPIDocumentEmbedder

    made = HuggingFaceAPIDocumentEmbedder(
        "text_embeddings_inference", {"url": URL + "/only/embedder/embed"}, normalize=True
    ).run([Document(content=text, id=str(index)) for index, text in enumerate(TEXTS)])
    check_vectors([document.embedding for document in made["documents"]])


def chromadb():
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

    made = OpenAIEmbeddingFunction(api_key="none", api_base=URL + "/v1", model_name="embedder")
    check_vectors([list(map(float, vector)) for vector in made(TEXTS)])


def qdrant():
    import openai
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, PointStruct, VectorParams

    client = openai.OpenAI(base_url=URL + "/v1", api_key="none")
    made = [each.embedding for each in client.embeddings.create(model="embedder", input=TEXTS).data]
    store = QdrantClient(":memory:")
    store.create_collection("c", VectorParams(size=24, distance=Distance.COSINE))
    store.upsert("c", [PointStruct(id=index, vector=vector) for index, vector in enumerate(made)])
    found = store.query_points("c", query=made[1], limit=1).points
    assert found[0].id == 1


def ollama_python():
    import ollama

    made = ollama.Client(host=URL).embed(model="embedder", input=TEXTS)
    check_vectors(made.embeddings)


CHECKS = (
    openai_python, langchain, llama_index, litellm_embedding, litellm_rerank, cohere_client, langchain_cohere,
    langchain_jina, hugging_face, llama_index_tei, haystack_tei, chromadb, qdrant, ollama_python,
)  # fmt: skip

for check in CHECKS:
    error = ""
    try:
        check()
    except ModuleNotFoundError as missing:
        print(f"{check.__name__}: {missing}", file=sys.stderr)
        continue
    except Exception:  # noqa: BLE001 - a check that fails is a line like any other
        error = traceback.format_exc()[-600:]
    print(json.dumps({"name": check.__name__, "error": error}), flush=True)
