"""A small application: an index that warms what it is given, a query engine, a conversation, and what was reused.

Run it twice: the second time the KV comes out of the store, and nothing is warmed.
"""

import sys

from library import MODEL, SYSTEM, embedding_folder, reference
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.blend_rag import (
    BlendContextChatEngine,
    BlendLLM,
    BlendReuseEvent,
    BlendSynthesizer,
    Warmer,
    WarmingVectorStore,
)


class Tell(BaseEventHandler):
    """Prints where the tokens of every prompt came from."""

    def handle(self, event, **kwargs):
        """One event."""
        if isinstance(event, BlendReuseEvent):
            told = event.report
            print(f"  {told['prompt_tokens']} prompt tokens: {told['reused_tokens']} reused, ", end="")
            print(
                f"{told['recomputed_tokens']} recomputed, {told['computed_tokens']} computed; first token after ",
                end="",
            )
            print(f"{event.ttft_s * 1000:.0f} ms; misses: {told['misses'] or 'none'}")


get_dispatcher().add_event_handler(Tell())
Settings.embed_model = HuggingFaceEmbedding(embedding_folder())

with BlendLLM(MODEL, store=sys.argv[1] if len(sys.argv) > 1 else "memory://", max_tokens=48) as llm:
    synthesizer = BlendSynthesizer(llm, system_prompt=SYSTEM)
    store = WarmingVectorStore(SimpleVectorStore(), Warmer(synthesizer), show_progress=True)
    documents = [Document(text=text, id_=name, metadata={"topic": name}) for name, text in reference().items()]
    index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))

    engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=4)
    print(engine.query("What does the nonlocal statement do?"), "\n")

    retriever = index.as_retriever(similarity_top_k=4)
    chat = BlendContextChatEngine.from_defaults(retriever=retriever, llm=llm, system_prompt=SYSTEM)
    for question in ("What does the del statement do?", "And what does the global statement do?"):
        for piece in chat.stream_chat(question).response_gen:
            print(piece, end="", flush=True)
        print("\n")
