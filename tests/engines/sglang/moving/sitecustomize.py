"""Has torch on a CPU answer what SGLang calls before it moves experts."""

import torch

vars(torch.cpu).setdefault("empty_cache", lambda: None)
