"""`BlendPostprocessor`: puts borders between nodes, for pipelines that keep their own synthesizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from blend_rag.in_band import IN_BAND_SEPARATOR, enclose
from llama_index.llms.blend_rag.warming import Warmer

ORIGINAL = "blend_rag_text"
"""Metadata key under which a node with borders keeps its text."""


class BlendPostprocessor(BaseNodePostprocessor):
    """Removes duplicates, orders, and puts borders into the text of nodes.

    With `in_band`, nodes are handed out as copies whose text, as an LLM sees it, is their former text with borders;
    `BlendLLM` takes the borders out again, and `original_nodes` gives back the nodes as they were. `BlendSynthesizer`
    needs no borders: pass `in_band=False`, and nodes stay untouched.

    Args:
        warmer: knows which nodes have KV; needed for `cached_first`.
        kwargs: the fields.

    Raises:
        ValueError: `cached_first` without a warmer.
    """

    in_band: bool = Field(default=True, description="Put borders into the text.")
    in_band_separator: str = Field(default=IN_BAND_SEPARATOR, description="The border; the model's must be the same.")
    remove_duplicates: bool = Field(default=True, description="Hand out each text once.")
    cached_first: bool = Field(default=False, description="Nodes whose KV is there come first.")

    _warmer: Warmer | None = PrivateAttr(default=None)

    def __init__(self, warmer: Warmer | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._warmer = warmer
        if self.cached_first and warmer is None:
            msg = "cached_first needs a warmer, which knows what has KV"
            raise ValueError(msg)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "BlendPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        found = _unique(nodes) if self.remove_duplicates else list(nodes)
        inner = [node.node for node in found]
        return self._hand_out(found, self._warmer.have_kv(inner) if self.cached_first and self._warmer else [])

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        found = _unique(nodes) if self.remove_duplicates else list(nodes)
        inner = [node.node for node in found]
        return self._hand_out(found, await self._warmer.ahave_kv(inner) if self.cached_first and self._warmer else [])

    def _hand_out(self, found: list[NodeWithScore], has_kv: list[bool]) -> list[NodeWithScore]:
        if has_kv:
            found = [found[number] for number in sorted(range(len(found)), key=lambda number: not has_kv[number])]
        return [self._with_borders(node) for node in found] if self.in_band else found

    def _with_borders(self, found: NodeWithScore) -> NodeWithScore:
        node = found.node
        text = enclose(node.get_content(MetadataMode.LLM), self.in_band_separator)
        metadata = {**node.metadata, ORIGINAL: node.get_content(MetadataMode.NONE)}
        copy = TextNode(
            id_=node.node_id,
            text=text,
            metadata=metadata,
            excluded_llm_metadata_keys=list(metadata),
            excluded_embed_metadata_keys=[*node.excluded_embed_metadata_keys, ORIGINAL],
            relationships=node.relationships,
        )
        copy.metadata["blend_rag_excluded"] = list(node.excluded_llm_metadata_keys)
        copy.excluded_llm_metadata_keys.append("blend_rag_excluded")
        return NodeWithScore(node=copy, score=found.score)


def original_nodes(nodes: Iterable[NodeWithScore]) -> list[NodeWithScore]:
    """Nodes, such as `response.source_nodes`, as they were before borders were put into them."""
    return [_without_borders(node) for node in nodes]


def _without_borders(found: NodeWithScore) -> NodeWithScore:
    node = found.node
    if ORIGINAL not in node.metadata:
        return found
    added = (ORIGINAL, "blend_rag_excluded")
    copy = TextNode(
        id_=node.node_id,
        text=node.metadata[ORIGINAL],
        metadata={name: value for name, value in node.metadata.items() if name not in added},
        excluded_llm_metadata_keys=node.metadata["blend_rag_excluded"],
        excluded_embed_metadata_keys=[name for name in node.excluded_embed_metadata_keys if name != ORIGINAL],
        relationships=node.relationships,
    )
    return NodeWithScore(node=copy, score=found.score)


def _unique(nodes: Iterable[NodeWithScore]) -> list[NodeWithScore]:
    first: dict[str, NodeWithScore] = {}
    for node in nodes:
        first.setdefault(node.node.get_content(MetadataMode.LLM), node)
    return list(first.values())
