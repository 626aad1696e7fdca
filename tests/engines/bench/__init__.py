"""``make bench-vllm``: what an update costs a real engine, beside its floor and its peers."""
