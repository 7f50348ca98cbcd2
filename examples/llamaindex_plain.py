"""An ordinary LlamaIndex query engine. Every question prefills its passages again."""

from library import GREEDY, MODEL, QUESTIONS, SYSTEM, embedding_folder, reference
from llama_index.core import Document, PromptTemplate, Settings, StorageContext, VectorStoreIndex
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.huggingface import HuggingFaceLLM

Settings.embed_model = HuggingFaceEmbedding(embedding_folder())
TEMPLATE = PromptTemplate("{context_str}\n\n{query_str}")

llm = HuggingFaceLLM(model_name=MODEL, tokenizer_name=MODEL, system_prompt=SYSTEM, **GREEDY)
synthesizer = get_response_synthesizer(llm, text_qa_template=TEMPLATE, response_mode="compact")
store = SimpleVectorStore()

documents = [Document(text=text, id_=name, metadata={"topic": name}) for name, text in reference().items()]
index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))
engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=4)

for question in QUESTIONS:
    print(f"\n{question}\n{engine.query(question)}")
