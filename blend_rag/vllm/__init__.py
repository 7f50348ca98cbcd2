"""The KV connector that blends inside vLLM. `blend_rag.vllm.connector` is what vLLM loads."""
