"""LlamaIndex components that reuse the KV of retrieved chunks."""

from llama_index.llms.blend_rag.base import BlendLLM, BlendReuseEvent
from llama_index.llms.blend_rag.chat_engine import BlendContextChatEngine
from llama_index.llms.blend_rag.postprocessor import BlendPostprocessor, original_nodes
from llama_index.llms.blend_rag.synthesizer import BlendSynthesizer
from llama_index.llms.blend_rag.warming import Warmer, WarmingVectorStore, WarmTransform

__all__ = [
    "BlendContextChatEngine",
    "BlendLLM",
    "BlendPostprocessor",
    "BlendReuseEvent",
    "BlendSynthesizer",
    "WarmTransform",
    "Warmer",
    "WarmingVectorStore",
    "original_nodes",
]
