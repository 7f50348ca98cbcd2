# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Time to first token with LlamaIndex
#
# A query engine over Python's language reference, answered by full prefill and by blending, with the same model in
# the same process.

# %%
import statistics
import sys

import matplotlib.pyplot as plt
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

sys.path.insert(0, "..")
from library import MODEL, QUESTIONS, SYSTEM, embedding_folder, reference

from blend_rag import FULL_PREFILL
from llama_index.llms.blend_rag import BlendLLM, BlendSynthesizer, Warmer, WarmingVectorStore

Settings.embed_model = HuggingFaceEmbedding(embedding_folder())
llm = BlendLLM(MODEL, max_tokens=1)
synthesizer = BlendSynthesizer(llm, system_prompt=SYSTEM)
store = WarmingVectorStore(SimpleVectorStore(), Warmer(synthesizer))
documents = [Document(text=text, id_=name, metadata={"topic": name}) for name, text in reference().items()]
index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))
retriever = index.as_retriever(similarity_top_k=6)

# %% [markdown]
# Both ways in turn, three times each; exact KV that an earlier run left on the device is dropped before each.


# %%
def ttft(layout, **options):
    llm.engine.clear_hot()
    return llm.complete_segments(layout, **options).raw["ttft_s"]


rows = []
for question in QUESTIONS:
    nodes = retriever.retrieve(question)
    layout, _ = synthesizer.layout(question, [synthesizer.passage(found.node) for found in nodes])
    times = [(ttft(layout, policy=FULL_PREFILL), ttft(layout)) for _ in range(3)]
    rows.append([statistics.median(column) for column in zip(*times, strict=True)])
speedup = statistics.median(full / blended for full, blended in rows)
print(f"median speed-up of the first token: ×{speedup:.1f}")

# %%
full, blended = zip(*rows, strict=True)
places = range(len(QUESTIONS))
plt.bar([place - 0.2 for place in places], full, width=0.4, label="full prefill")
plt.bar([place + 0.2 for place in places], blended, width=0.4, label="blended")
plt.xticks(list(places), QUESTIONS)
plt.ylabel("time to first token, s")
plt.legend()
plt.show()

# %% [markdown]
# What happened to every token of the last prompt:

# %%
llm.engine.clear_hot()
llm.engine.generate(layout, max_tokens=1).report

# %%
llm.close()
