"""The same chain as in langchain_plain.py with three other lines: passages are computed once, at ingestion."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_library import documents, embeddings
from library import MODEL, QUESTIONS, SYSTEM

from langchain_blend_rag import BlendPrompt, ChatBlend, Warmer, WarmingVectorStore

chat = ChatBlend(model=MODEL, max_tokens=48)
prompt = BlendPrompt(system=SYSTEM, llm=chat)
store = WarmingVectorStore(InMemoryVectorStore(embeddings()), Warmer(chat, prompt))

store.add_documents(documents())
retriever = store.as_retriever(search_kwargs={"k": 4})
chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat | StrOutputParser()

for question in QUESTIONS:
    print(f"\n{question}")
    for piece in chain.stream(question):
        print(piece, end="", flush=True)
print()
