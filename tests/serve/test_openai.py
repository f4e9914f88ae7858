"""POST /v1/embeddings, asked by the programs that it is meant for: OpenAI's client, LangChain's and Chroma's."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from serve_client import REACT, as_form, as_json, check_error

import react_clip as rc

pytestmark = pytest.mark.process

Direct = Callable[..., rc.Defended]


def url_of(photo: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(photo).decode()}"


@pytest.fixture(scope="module")
def model(server: Any) -> str:
    return str(server.client.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture(scope="module")
def official(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.smoke
def test_the_openai_client_gets_defended_features(
    official: openai.OpenAI, model: str, direct: Direct, photos: list[bytes]
) -> None:
    assert [each.id for each in official.models.list()] == [model]
    expected = direct(photos).features
    plain = base64.b64encode(photos[1]).decode()
    for options in ({}, {"encoding_format": "float"}, {"dimensions": expected.shape[1], "user": "somebody"}):
        answer = official.embeddings.create(model=model, input=[url_of(photos[0]), plain], **options)
        features = torch.tensor([each.embedding for each in answer.data])
        assert torch.allclose(features, expected[:2], atol=1e-5)
        assert [each.index for each in answer.data] == [0, 1]
    alone = official.embeddings.create(model=model, input=url_of(photos[1])).data
    assert torch.allclose(torch.tensor([each.embedding for each in alone]), expected[1:2], atol=1e-5)


def test_texts_and_images_share_a_space(
    official: openai.OpenAI, model: str, encoder: rc.Encoder, direct: Direct, photos: list[bytes]
) -> None:
    with torch.no_grad():
        texts = encoder.encode_text(["a cat", "cats"])
    answer = official.embeddings.create(model=model, input=["a cat", url_of(photos[0]), "cats", "a cat"])
    features = torch.tensor([each.embedding for each in answer.data])
    wanted = torch.stack([texts[0], direct(photos[:1]).features[0], texts[1], texts[0]])
    assert torch.allclose(features, wanted, atol=1e-5)
    many = [f"a photo of thing {number}" for number in range(100)]
    rows = official.embeddings.create(model=model, input=many).data
    with torch.no_grad():
        assert torch.allclose(torch.tensor([row.embedding for row in rows]), encoder.encode_text(many), atol=1e-5)


def test_the_openai_client_shows_our_line(official: openai.OpenAI, model: str, photos: list[bytes]) -> None:
    url = url_of(photos[0])
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"input": [url, "data:image/png;base64,AAAA"]}, "input[1]", "input[1] is not an image we read"),
        ({"input": [url, "https://example.org/cat.jpg"]}, "input[1]", "addresses are not fetched"),
        ({"input": [url] * 17}, "input", "input has 17 images, at most 16"),
        ({"input": ["text"] * 1001}, "input", "input has 1,001 entries, at most 1,000"),
        ({"input": ["text", " "]}, "input[1]", "input[1] is empty"),
        ({"input": [url, "word " * 300]}, "input[1]", "is no valid base64"),
        ({"input": [[1, 2, 3]]}, "input", "check_embedding_ctx_length=False"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [url], "dimensions": 3}, "dimensions", "dimensions is 3; this model has 32"),
        ({"input": [url], "model": "text-embedding-3-small"}, "model", f"this service has '{model}'"),
    ]
    for fields, field, words in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            official.embeddings.create(**{"model": model, **fields})
        assert words in caught.value.message
        assert (caught.value.param, caught.value.type) == (field, "invalid_request")


def test_langchain_and_chroma(server: Any, model: str, direct: Direct, photos: list[bytes]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chroma = pytest.importorskip("chromadb.utils.embedding_functions")
    entries = [url_of(photo) for photo in photos[:4]]
    wanted = direct(photos[:4]).features.numpy()
    options = {"base_url": f"{server.url}/v1", "api_key": "none", "model": model, "chunk_size": 3}
    embeddings = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    assert np.allclose(embeddings.embed_documents(entries), wanted, atol=1e-5)
    assert np.allclose(embeddings.embed_query(entries[1]), wanted[1], atol=1e-5)
    function = chroma.OpenAIEmbeddingFunction(api_key="none", api_base=f"{server.url}/v1", model_name=model)
    assert np.allclose(np.array(function(entries)), wanted, atol=1e-5)


# ---------------------------------------------------------------------- without these programs


def test_forms_and_labels(client: Any, direct: Direct, photos: list[bytes]) -> None:
    wanted = direct(photos[:2], ("zebra", "boat")).features
    for sent in (as_form(photos[:2], labels="zebra, boat"), as_json(photos[:2], labels=["zebra", "boat"])):
        rows = client.post("/v1/embeddings", **sent).json()["data"]
        assert torch.allclose(torch.tensor([row["embedding"] for row in rows]), wanted, atol=1e-5)


def test_a_model_without_text_tower_says_so(start: Any, encoder: rc.Encoder, photos: list[bytes]) -> None:
    text, encoder._text = encoder._text, None
    try:
        preset = rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], torch.eye(2, encoder.dim))
        client = start(REACT, preset=preset)
        answer = client.post("/v1/embeddings", json={"input": "a cat"})
        check_error(answer, 400, "input[0] is no image", "no text tower")
        assert client.post("/v1/embeddings", json={"input": url_of(photos[0])}).status_code == 200
        assert client.get("/v1/info").json()["text"] is False
    finally:
        encoder._text = text
