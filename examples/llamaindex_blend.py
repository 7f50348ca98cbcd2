"""The same query engine as in llamaindex_plain.py with three other lines: passages are computed once, at ingestion."""

from library import MODEL, QUESTIONS, SYSTEM, embedding_folder, reference
from llama_index.core import Document, PromptTemplate, Settings, StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.blend_rag import BlendLLM, BlendSynthesizer, Warmer, WarmingVectorStore

Settings.embed_model = HuggingFaceEmbedding(embedding_folder())
TEMPLATE = PromptTemplate("{context_str}\n\n{query_str}")

llm = BlendLLM(MODEL, max_tokens=48)
synthesizer = BlendSynthesizer(llm, system_prompt=SYSTEM, text_qa_template=TEMPLATE)
store = WarmingVectorStore(SimpleVectorStore(), Warmer(synthesizer))

documents = [Document(text=text, id_=name, metadata={"topic": name}) for name, text in reference().items()]
index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))
engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=4)

for question in QUESTIONS:
    print(f"\n{question}\n{engine.query(question)}")
