"""``make bench-vllm``: what an update costs a real vLLM, beside its floor and its peers."""
