"""Fields of the configurations in a checkpoint: which of them decide what the weights compute."""

from __future__ import annotations

import json
import re
from typing import Any, Final

RUN_FIELDS: Final = frozenset(
    {
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "_commit_hash",
        "_from_model_config",
    }
)
"""Fields of configurations that tell of a run and not of what the weights compute; trainers keep
fp32 masters of bf16 weights, and switch the cache off."""


_OF_TRAINING: Final = re.compile("drop(out|path|_prob|_rate)|layerdrop|_loss_|^initializer_")

LIBRARY: Final = "quantization_config"  # has a check of its own, which knows releases of libraries


RUNTIME: Final = frozenset(
    {"architectures", "problem_type", "output_attentions", "output_hidden_states", "return_dict"}
)
"""Fields that a trainer, ``save_pretrained`` or the model's own forward sets."""

ID_END: Final = "_token_id"  # of ids that trainers align with the tokenizer


def fields(data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return _without(json.loads(data))
    except (ValueError, RecursionError):
        return None


def differing_fields(old: Any, new: Any) -> str:  # noqa: ANN401 - JSON
    """Name the fields in which two configurations differ; a null is an absent field."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return "" if old == new else "other content"
    found = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return ", ".join(repr(key) for key in found if key != LIBRARY)


def _without(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        kept = (k for k in value if k not in RUN_FIELDS and not _OF_TRAINING.search(k))
        return {key: _without(value[key]) for key in kept}
    return [_without(one) for one in value] if isinstance(value, list) else value


def settings_of(settings: object) -> dict[str, Any]:
    told = getattr(settings, "to_dict", None)
    found = fields(json.dumps(told(), default=str).encode()) if callable(told) else None
    return found if isinstance(found, dict) else {}
