"""A small application: an index that warms what changed, a conversation, a batch, and what was reused.

Run it twice: the second time the KV comes out of the store, and nothing is warmed.
"""

import sys

from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_library import documents, embeddings
from library import MODEL, SYSTEM

from langchain_blend_rag import BlendPrompt, BlendRetriever, ChatBlend, Warmer, WarmingVectorStore

STORE = sys.argv[1] if len(sys.argv) > 1 else "memory://"


def tell(answer: AIMessage) -> None:
    """The answer, and where its prompt's tokens came from."""
    usage, report = answer.usage_metadata, answer.response_metadata["blend_rag"]
    details = usage["input_token_details"]
    print(f"{answer.text}\n  {usage['input_tokens']} prompt tokens: {details['cache_read']} reused, ", end="")
    print(f"{details['recomputed']} recomputed, {details['computed']} computed; first token after ", end="")
    print(f"{answer.response_metadata['ttft_s'] * 1000:.0f} ms; misses: {report['misses'] or 'none'}\n")


with ChatBlend(model=MODEL, store=STORE, max_tokens=48) as chat:
    prompt = BlendPrompt(system=SYSTEM, llm=chat)
    store = WarmingVectorStore(InMemoryVectorStore(embeddings()), Warmer(chat, prompt), show_progress=True)
    records = InMemoryRecordManager("reference")
    records.create_schema()
    done = index(documents(), records, store, cleanup="incremental", source_id_key="source", key_encoder="sha256")
    print(f"indexed: {done}")

    retriever = BlendRetriever(retriever=store.as_retriever(search_kwargs={"k": 4}))
    fields = {
        "context": RunnableLambda(lambda given: given["question"]) | retriever,
        "question": lambda given: given["question"],
        "chat_history": lambda given: given.get("chat_history", []),
    }
    chain = fields | prompt | chat

    first = "What does the nonlocal statement do?"
    answer = chain.invoke({"question": first})
    tell(answer)
    history = [("human", first), ("ai", answer.text)]
    tell(chain.invoke({"question": "And how is global different?", "chat_history": history}))
    for answer in chain.batch([{"question": "What does del do?"}, {"question": "What is a lambda expression?"}]):
        tell(answer)
