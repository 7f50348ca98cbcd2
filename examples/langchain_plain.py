"""An ordinary LangChain chain: retrieve, prompt, answer. Every question prefills its passages again."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from langchain_library import GREEDY, HUMAN, documents, embeddings, joined
from library import MODEL, QUESTIONS, SYSTEM

chat = ChatHuggingFace(llm=HuggingFacePipeline.from_model_id(MODEL, "text-generation", pipeline_kwargs=GREEDY))
prompt = RunnablePassthrough.assign(context=joined) | ChatPromptTemplate([("system", SYSTEM), ("human", HUMAN)])
store = InMemoryVectorStore(embeddings())

store.add_documents(documents())
retriever = store.as_retriever(search_kwargs={"k": 4})
chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat | StrOutputParser()

for question in QUESTIONS:
    print(f"\n{question}")
    for piece in chain.stream(question):
        print(piece, end="", flush=True)
print()
