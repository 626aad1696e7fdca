"""What of the benchmark only SGLang has."""
