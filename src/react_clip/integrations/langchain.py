"""Embeddings for LangChain."""

from __future__ import annotations

from react_clip.errors import ReactClipError
from react_clip.integrations.common import DefendedFeatures
from react_clip.optional import require

_langchain = require("langchain_core.embeddings", "LangChainEmbeddings", extra="integrations")


class LangChainEmbeddings(DefendedFeatures, _langchain.Embeddings):  # type: ignore[misc, name-defined]
    """LangChain's ``Embeddings`` for texts, with ``embed_image`` for files, as its ``OpenCLIPEmbeddings`` has.

    Takes the arguments of :class:`~react_clip.integrations.common.DefendedFeatures`.
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One unit vector per text."""
        return list(self.of_texts(texts).tolist())

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of a text."""
        return self.embed_documents([text])[0]

    def embed_image(self, uris: list[str]) -> list[list[float]]:
        """One defended unit vector per image file; URLs are not fetched."""
        if isinstance(uris, str):
            raise ReactClipError(f"uris are one string, {uris[:60]!r}; give a list of paths")
        return list(self.of_images(uris).tolist())
