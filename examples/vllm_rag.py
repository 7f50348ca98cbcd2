"""RAG over vLLM: the same application over a running server, or over vLLM in this process.

Start a server with the connector and name its URL:

    blend-rag serve MODEL --run
    python vllm_rag.py http://127.0.0.1:8000

or let this process run vLLM: `python vllm_rag.py vllm`. `VLLM_API_KEY` holds the server's key if it wants one.
"""

import sys

from library import QUESTIONS, SYSTEM, reference

from blend_rag import Passage, PromptBuilder, load_engine


def main(engine_name: str) -> None:
    with load_engine(engine=engine_name) as engine:
        prompts = PromptBuilder(engine.tokenizer, system=SYSTEM)
        passages = {name: Passage(text, source=name, document=name) for name, text in reference().items()}
        warmed = engine.warm(prompts, passages.values(), show_progress=True)
        print(f"{engine.model_name}: {warmed.computed} passages computed, {warmed.present} were there")

        for question in QUESTIONS:
            words = [word.strip("?").lower() for word in question.split()]
            found = [passage for name, passage in passages.items() if name.split("#")[0] in words]
            others = [passage for passage in passages.values() if passage not in found]
            layout = prompts.build(passages=[*others[:4], *found], question=question)
            print(f"\n{question}")
            for piece in engine.stream(layout, max_tokens=48):
                print(piece.text, end="", flush=True)
            print(f"\n  {piece.generation.report}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
