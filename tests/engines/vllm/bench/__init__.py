"""What of the benchmark only vLLM has."""
