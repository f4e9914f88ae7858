"""Embeddings inside the real Chroma and LangChain, beside Chroma's own CLIP and our own guard."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import react_clip as rc
import tiny_clip
from react_clip.integrations import drift_only
from toys import patch_encoder

from .conftest import CLOSED, OPEN, check_refusals

ALWAYS = drift_only(OPEN, tau=-1.0)
NEVER = drift_only(CLOSED, tau=1e9)
TEXTS = ["a cat", "a dog", "a teapot"]


def arrays(paths: list[Path]) -> list[Any]:
    return [np.asarray(Image.open(path)) for path in paths]


def defended(encoder: rc.Encoder, paths: list[Path], seed: int | bytes = 0) -> torch.Tensor:
    """What our own guard gives; it looks at no classes."""
    classifier = rc.ZeroShotClassifier(encoder, ["cat", "dog"])
    found = ALWAYS(classifier, list(paths), seed=seed)
    assert found.gated.all()
    return found.features


def test_a_chroma_collection_of_images_and_texts(encoder: rc.Encoder, photos: list[Path]) -> None:
    import chromadb
    from chromadb.api.types import EmbeddingFunction

    function = rc.integrations.ChromaEmbeddings(encoder, ALWAYS, seed=4)
    assert isinstance(function, EmbeddingFunction)
    collection = chromadb.EphemeralClient().create_collection("photos", embedding_function=function)
    collection.add(ids=[path.name for path in photos], images=arrays(photos))
    collection.add(ids=TEXTS, documents=TEXTS)
    stored = collection.get(ids=[path.name for path in photos], include=["embeddings"])
    order = [stored["ids"].index(path.name) for path in photos]
    expected = defended(encoder, photos, seed=4)
    assert np.allclose(np.asarray(stored["embeddings"])[order], expected.numpy(), atol=1e-5)
    for path, array in zip(photos, arrays(photos), strict=True):
        found = collection.query(query_images=[array], n_results=1)
        assert found["ids"] == [[path.name]]
        assert found["distances"][0][0] == pytest.approx(0, abs=1e-5)
    everything = collection.query(query_texts=["a dog"], n_results=7)
    assert everything["ids"][0][0] == "a dog"


def test_a_closed_guard_is_chromas_own_clip(open_clip_name: str, open_clip_weights: Path, fitting: list[Path]) -> None:
    from chromadb.utils.embedding_functions import OpenCLIPEmbeddingFunction

    stock = OpenCLIPEmbeddingFunction(tiny_clip.OPEN_CLIP_NAME, str(open_clip_weights))
    function = rc.integrations.ChromaEmbeddings(open_clip_name, NEVER)
    mixed = [*arrays(fitting), *TEXTS]
    assert np.allclose(function(mixed), stock(mixed), atol=1e-5)
    assert function.default_space() == stock.default_space()


def test_a_stored_collection_opens_with_what_it_was_made_with(
    hf_folder: Path, photos: list[Path], tmp_path: Path
) -> None:
    import chromadb

    function = rc.integrations.ChromaEmbeddings(hf_folder, OPEN, labels=["cat", "dog"], seed=4)
    made = chromadb.PersistentClient(tmp_path).create_collection("photos", embedding_function=function)
    made.add(ids=["0"], images=arrays(photos[:1]))
    chromadb.api.client.SharedSystemClient.clear_system_cache()
    opened = chromadb.PersistentClient(tmp_path).get_collection("photos")
    assert opened.query(query_images=arrays(photos[:1]))["distances"][0][0] == pytest.approx(0, abs=1e-5)
    rebuilt = function.build_from_config(function.get_config())
    assert rebuilt is function.build_from_config(function.get_config()), "the model is loaded once"
    assert rebuilt.get_config() == function.get_config()


def test_secrets_are_not_stored(hf_folder: Path, encoder: rc.Encoder, photos: list[Path], tmp_path: Path) -> None:
    import chromadb

    secret = b"open sesame, once and for all"
    function = rc.integrations.ChromaEmbeddings(hf_folder, ALWAYS, secret=secret)
    client = chromadb.PersistentClient(tmp_path)
    client.create_collection("photos", embedding_function=function).add(ids=["0"], images=arrays(photos[:1]))
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert np.allclose(function(arrays(photos)), defended(encoder, photos, secret).numpy(), atol=1e-5)
    with pytest.raises(rc.ReactClipError, match="made with a secret, which Chroma does not store"):
        function.build_from_config(function.get_config())


def test_langchain_searches_texts_and_photos(encoder: rc.Encoder, photos: list[Path]) -> None:
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import InMemoryVectorStore

    embeddings = rc.integrations.LangChainEmbeddings(encoder, ALWAYS, seed=4)
    assert isinstance(embeddings, Embeddings)
    vectors = embeddings.embed_image([str(path) for path in photos])
    assert torch.allclose(torch.tensor(vectors), defended(encoder, photos, seed=4), atol=1e-5)
    assert embeddings.embed_query(TEXTS[1]) == pytest.approx(embeddings.embed_documents(TEXTS)[1], abs=1e-6)
    assert asyncio.run(embeddings.aembed_query(TEXTS[0])) == embeddings.embed_query(TEXTS[0])
    store = InMemoryVectorStore(embeddings)
    store.add_texts(TEXTS)
    assert store.similarity_search("a teapot", k=1)[0].page_content == "a teapot"
    assert embeddings.embed_documents([]) == embeddings.embed_image([]) == []


def test_second_look_is_the_default_and_needs_no_classes(photos: list[Path]) -> None:
    encoder = patch_encoder()
    encoder.name = encoder.weights = "clip-vit-b-16"
    embeddings = rc.integrations.LangChainEmbeddings(encoder, seed=4)
    assert embeddings.guard == rc.SecondLook()
    # Threshold 0 corrects every image, threshold 2 none.
    pixels = encoder.prepare(list(photos))
    for threshold in (0, 2):
        guard = rc.SecondLook(drift_threshold=threshold)
        found = rc.integrations.LangChainEmbeddings(encoder, guard, seed=4).embed_image([str(path) for path in photos])
        expected = guard.run(encoder, pixels, 4)
        assert torch.allclose(torch.tensor(found), expected.features, atol=1e-5)
        assert set(expected.gated.tolist()) == {threshold == 0}


def test_without_classes_the_default_guard_looks_at_the_drift_alone(
    encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("name", "weights"):
        monkeypatch.setattr(encoder, name, "openai/clip-vit-base-patch32")
    assert rc.integrations.LangChainEmbeddings(encoder).guard == rc.ReACT(instability=False, tau=0.35)
    assert rc.integrations.LangChainEmbeddings(encoder, labels=["cat", "dog"]).guard == rc.ReACT()


@pytest.mark.tower
def test_the_offline_tower_knows_the_texts_of_its_table(tower: rc.Encoder, photos: list[Path]) -> None:
    embeddings = rc.integrations.LangChainEmbeddings(tower, seed=4)
    text = torch.tensor(embeddings.embed_query("Golden Retriever"))
    assert torch.allclose(text, rc.LabelTable.load().features(["golden retriever"])[0], atol=1e-6)
    with pytest.raises(rc.ReactClipError, match="has no"):
        embeddings.embed_query("a photo taken in the rain")


def test_errors_are_one_line(encoder: rc.Encoder, hf_folder: Path, tmp_path: Path) -> None:
    langchain = rc.integrations.LangChainEmbeddings(encoder, ALWAYS)
    chroma = rc.integrations.ChromaEmbeddings(encoder, ALWAYS)
    check_refusals(
        (lambda: langchain.embed_image(["https://example.org/cat.jpg"]), "not fetched"),
        (lambda: langchain.embed_image("photo.png"), "give a list of paths"),
        (lambda: chroma([3]), "an item is of type int"),
        (lambda: chroma([np.zeros((4, 4, 3))]), r"of shape \[4, 4, 3\]: got HWC float64 0\.\.0; give HWC uint8"),
        (lambda: chroma([np.zeros((4, 4, 2), np.uint8)]), "give HWC uint8"),
        (lambda: rc.integrations.ChromaEmbeddings(encoder, OPEN), "there are no classes"),
    )
