"""Prints what the embedded engine selects and answers, as JSON; runs where its version of transformers is."""

from __future__ import annotations

import json
import sys

from blend_rag import PromptBuilder, RecomputePolicy, load_engine
from blend_rag.engines.base import TokenFate


def main() -> None:
    task = json.load(sys.stdin)
    found = {}
    with load_engine(task["model"], keep_new=False) as engine:
        prompts = PromptBuilder(engine.tokenizer, system=task["system"])
        layout = prompts.build(passages=task["passages"], question=task["question"])
        engine.warm(prompts, task["passages"])
        for selector in task["selectors"]:
            policy = RecomputePolicy(ratio=0.15, selector=selector)
            answer = engine.generate(layout, max_tokens=task["tokens"], ignore_eos=True, policy=policy)
            fates = [fate for _, fate in answer.report.tokens]
            found[selector] = {
                "recomputed": [i for i, fate in enumerate(fates) if fate is TokenFate.RECOMPUTED],
                "token_ids": list(answer.token_ids),
            }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
