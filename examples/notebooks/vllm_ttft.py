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
# # Time to first token on a vLLM server
#
# Start a server with the connector (`blend-rag serve MODEL --run`); `BLEND_RAG_SERVER` names its URL and `VLLM_API_KEY`
# its key. Full prefill and blending take turns on that server, over prompts of growing length.

# %%
import os
import random
import statistics
import sys

import matplotlib.pyplot as plt

sys.path.insert(0, "..")
from library import SYSTEM, TOPICS, reference

from blend_rag import FULL_PREFILL, PromptBuilder, load_engine

engine = load_engine(engine=os.environ.get("BLEND_RAG_SERVER", "http://127.0.0.1:8000"))
prompts = PromptBuilder(engine.tokenizer, system=SYSTEM)
passages = list(reference(TOPICS).values())
warmed = engine.warm(prompts, passages, show_progress=True)
print(f"{engine.model_name} on vLLM {engine.about['vllm']}: {warmed.computed} computed, {warmed.present} were there")

# %% [markdown]
# Passages are shuffled anew for every prompt, so vLLM's own prefix cache does not help.

# %%
rng = random.Random(0)
number = 0


def ttft(count, policy=None):
    global number
    number += 1
    layout = prompts.build(passages=rng.sample(passages, count), question=f"Question {number}: what do these say?")
    return engine.generate(layout, max_tokens=1, policy=policy).report


rows = []
for count in (1, 2, 4, 6):
    for policy in (FULL_PREFILL, None):
        ttft(count, policy)
    pairs = [(ttft(count, FULL_PREFILL), ttft(count)) for _ in range(3)]
    tokens = statistics.median(report.prompt_tokens for pair in pairs for report in pair)
    rows.append([tokens, *(statistics.median(report.ttft_s for report in arm) for arm in zip(*pairs, strict=True))])
    print(
        f"{tokens:6.0f} tokens: full {rows[-1][1]:.2f} s, blended {rows[-1][2]:.2f} s, ×{rows[-1][1] / rows[-1][2]:.1f}"
    )

# %%
tokens, full, blended = zip(*rows, strict=True)
plt.plot(tokens, full, marker="o", label="full prefill")
plt.plot(tokens, blended, marker="o", label="blended")
plt.xlabel("prompt tokens")
plt.ylabel("time to first token, s")
plt.ylim(bottom=0)
plt.legend()
plt.show()

# %% [markdown]
# What happened to every token of one more prompt:

# %%
ttft(4)

# %%
engine.close()
