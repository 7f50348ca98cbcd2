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
# # Time to first token with LangChain
#
# A chain over Python's language reference, answered by full prefill and by blending, with the same model in the same
# process.

# %%
import statistics
import sys

import matplotlib.pyplot as plt
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

sys.path.insert(0, "..")
from langchain_library import documents, embeddings
from library import MODEL, QUESTIONS, SYSTEM

from blend_rag import FULL_PREFILL
from langchain_blend_rag import BlendPrompt, ChatBlend, Warmer, WarmingVectorStore

chat = ChatBlend(model=MODEL, max_tokens=1)
prompt = BlendPrompt(system=SYSTEM, llm=chat)
store = WarmingVectorStore(InMemoryVectorStore(embeddings()), Warmer(chat, prompt))
store.add_documents(documents())
prompts = {"context": store.as_retriever(search_kwargs={"k": 6}), "question": RunnablePassthrough()} | prompt

# %% [markdown]
# Both ways in turn, three times each; exact KV that an earlier run left on the device is dropped before each.


# %%
def ttft(value, **options):
    chat.engine.clear_hot()
    return chat.invoke(value, **options).response_metadata["ttft_s"]


rows = []
for question in QUESTIONS:
    value = prompts.invoke(question)
    times = [(ttft(value, policy=FULL_PREFILL), ttft(value)) for _ in range(3)]
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
chat.engine.clear_hot()
chat.engine.generate(chat.layout(value), max_tokens=1).report

# %%
chat.close()
