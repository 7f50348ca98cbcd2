"""LangChain's own unit tests for chat models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from blend_rag.engines.transformers import TransformersEngine
from langchain_blend_rag import ChatBlend


class TestChatBlendUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _engine(self, engine: TransformersEngine) -> None:
        type(self).engine = engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """Without the key of a service that there is not; misspelt arguments are refused."""
        return {name: value for name, value in super().standard_chat_model_params.items() if name != "api_key"}

    @property
    def supports_model_override(self) -> bool:
        return False  # an engine holds one model

    @property
    def has_tool_calling(self) -> bool:
        return False  # SmolLM2's chat template shows no tools
