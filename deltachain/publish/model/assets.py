"""Small files of a checkpoint besides its weights: configuration and tokenizer."""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from deltachain import checkpoint
from deltachain.errors import UnsupportedModelError
from deltachain.publish.config import PublishConfig
from deltachain.publish.model import kept_files
from deltachain.publish.model.flat_shards import named_shards
from deltachain.publish.model.kept_files import CONFIG_FILE
from deltachain.publish.model.refusals import is_of_peft
from deltachain.publish.model.wire_dtypes import origin
from deltachain.redact import redacted_url
from deltachain.remote_code import without_remote_code
from deltachain.torch_names import TORCH_DTYPES, named_tensors, unwrapped
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from deltachain.publish.model.source import TensorSource

logger = logging.getLogger(__name__)


_CODES: Final = ("F8", "U8", "I8")
"""Beginnings of the dtypes that a quantised checkpoint has, by whatever file it says so."""

_MADE_HINT: Final = (
    f"correct the fields of {CONFIG_FILE}, such as num_hidden_layers, vocab_size or architectures, "
    f"or save the checkpoint again; weights in a folder without {CONFIG_FILE} are published as "
    "they are"
)


@dataclass(frozen=True, slots=True)
class Difference:
    made: nn.Module  # of a configuration
    weights: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # of a weight, and in the model
    missing: Collection[str]  # among the weights
    extra: Collection[str]


def refuse_other_folder(files: Mapping[str, bytes], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse a checkpoint whose ``config.json`` describes other weights than it has.

    Where transformers knows no class, or the checkpoint is quantised, nothing is compared.
    """
    if CONFIG_FILE not in files or any(one.dtype.startswith(_CODES) for one in specs.values()):
        return
    try:
        difference = _difference(files[CONFIG_FILE], specs)
    except Exception as exc:  # noqa: BLE001 - absent, or of any model's code
        logger.debug("%s is not compared with the weights: %s", CONFIG_FILE, exc)
        return
    if difference is not None:
        refuse_difference(difference, by=CONFIG_FILE, hint=_MADE_HINT)


def refuse_difference(difference: Difference, *, by: str, hint: str) -> None:
    """Refuse weights that a model does not load as they are, but for those outside of it."""
    made, weights = difference.made, difference.weights
    outside = [
        name
        for name in sorted(difference.extra)
        if _is_outside(name, made) or (name in weights and not weights[name].is_floating_point())
    ]
    faults = [
        *(
            f"{name!r} has shape {mine}, and by {by} {wanted}: what is published could not be "
            "loaded"
            for name, (mine, wanted) in sorted(difference.shapes.items())
        ),
        *(
            f"{name!r} is not among the weights, and a model made of {by} has it: what is "
            "published would load with random values there"
            for name in sorted(difference.missing)
        ),
        *(
            f"{name!r} is not in a model made of {by}: what is published would load without it"
            for name in sorted(set(difference.extra).difference(outside))
        ),
    ]
    if faults:
        raise UnsupportedModelError(faults[0], hint=hint)
    if outside:
        logger.warning(
            "%d tensors such as %r are not in a model made of %s: they are published, and "
            "from_pretrained leaves them out",
            len(outside),
            outside[-1],
            by,
        )


def _is_outside(name: str, made: nn.Module) -> bool:
    modules, holder = dict(made.named_modules()), name.rpartition(".")[0]
    while holder not in modules:
        holder = holder.rpartition(".")[0]
    later = getattr(getattr(made, "config", None), "num_nextn_predict_layers", None)
    if later and isinstance(modules[holder], nn.ModuleList):
        return True
    return holder in ("", getattr(made, "base_model_prefix", ""))


def _difference(data: bytes, specs: Mapping[str, TensorSpec]) -> Difference | None:
    import transformers  # noqa: PLC0415 - slow, and only for the first version of a chain

    config = kept_files.read_config(data)
    kind: Any = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if kind is None or getattr(config, checkpoint.LIBRARY, None):
        return None
    state = {
        name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        for name, spec in specs.items()
    }
    with _quiet(transformers.utils.logging):
        made, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    shapes = {name: (tuple(one), tuple(other)) for name, one, other in info["mismatched_keys"]}
    return Difference(made, state, shapes, info["missing_keys"], info["unexpected_keys"])


@contextmanager
def _quiet(log: Any) -> Iterator[None]:  # noqa: ANN401 - a module of transformers
    level, shows = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shows:
            log.enable_progress_bar()


_OTHER_FILES: Final = (
    "; or give PublishConfig.assets, a folder of the files to publish, if no follower loads them "
    "with from_pretrained"
)

_HINT: Final = (
    "set the fields of model.config to the model, such as num_labels, vocab_size or "
    f"num_hidden_layers{_OTHER_FILES}"
)


def refuse_other_config(wrapper: nn.Module) -> None:
    model = unwrapped(wrapper)
    config = getattr(model, "config", None)
    if not hasattr(model, "from_pretrained") or not hasattr(config, "save_pretrained"):
        return
    try:
        with torch.device("meta"):
            made = type(model)(copy.deepcopy(config))
    except Exception as exc:  # noqa: BLE001 - of any model's code
        logger.warning(
            "%s cannot be made of its configuration, so that they are not compared: %s",
            type(model).__name__,
            exc,
        )
        return
    tied, by_config = _is_tied(model), _is_tied(made)
    if None not in (tied, by_config) and tied != by_config:
        raise UnsupportedModelError(
            f"the output embedding is {'tied' if tied else 'a weight of its own'}, and the model's "
            f"configuration says tie_word_embeddings={by_config}: what is published would load as "
            "another model",
            hint=f"set model.config.tie_word_embeddings = {tied}{_OTHER_FILES}",
        )
    have, wanted = dict(named_shards(wrapper)), dict(named_tensors(made))
    shapes = {
        name: (tuple(tensor.shape), tuple(wanted[name].shape))
        for name, tensor in have.items()
        if name in wanted and tensor.numel() and tensor.shape != wanted[name].shape
    }
    renamed = getattr(config, checkpoint.LIBRARY, None) or any(map(is_of_peft, model.modules()))
    names = (wanted.keys() - have.keys(), have.keys() - wanted.keys()) if not renamed else ((), ())
    difference = Difference(made, have, shapes, *names)
    refuse_difference(difference, by="the model's configuration", hint=_HINT)


def _is_tied(model: nn.Module) -> bool | None:
    """Return whether the output embedding is the input's; ``None`` if it cannot be."""
    try:
        first = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
        last = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    if first is None or last is None or first.shape != last.shape:
        return None
    return first is last


def with_config_watched(
    model: nn.Module, live: Callable[[], Iterable[tuple[str, Tensor]]]
) -> Callable[[], Iterable[tuple[str, Tensor]]]:
    """Return ``live`` with a look at the model's configuration before each iteration.

    Trainers change generation settings as well: that is logged, and all else refused.
    """
    then, generation = _settings(model), _generation(model)
    said: set[str] = set()

    def looked() -> Iterable[tuple[str, Tensor]]:
        if changed := checkpoint.differing_fields(then, _settings(model)):
            raise UnsupportedModelError(
                f"the model's configuration changed in {changed} since the publisher was attached",
                hint="followers have the files of that time: close this publisher, and attach "
                "another one at a URL of its own; or set the fields back",
            )
        changed = checkpoint.differing_fields(generation, _generation(model))
        if changed and changed not in said:
            said.add(changed)
            logger.warning(
                "the model's generation settings changed in %s since the publisher was attached: "
                "followers keep the earlier ones",
                changed,
            )
        return live()

    return looked


def _settings(model: nn.Module) -> dict[str, Any]:
    if not hasattr(model, "from_pretrained"):
        return {}
    found = checkpoint.settings_of(getattr(model, "config", None))
    return {
        k: v
        for k, v in found.items()
        if k not in checkpoint.RUNTIME and not k.endswith(checkpoint.ID_END)
    }


def _generation(model: nn.Module) -> dict[str, Any]:
    """Return the values of configuration and generation settings for sampling and stops."""
    config = checkpoint.settings_of(getattr(model, "config", None))
    ids = {key: value for key, value in config.items() if key.endswith(checkpoint.ID_END)}
    settings = checkpoint.settings_of(getattr(model, "generation_config", None))
    both = {key: (ids.get(key), settings.get(key)) for key in ids.keys() | settings.keys()}
    return {key: values for key, values in both.items() if values != (None, None)}


def collect_assets(
    model: "nn.Module | TensorSource", config: PublishConfig, *others: object
) -> dict[str, bytes]:
    """Return the files that belong to a model: those of its checkpoint, as they would be now.

    Files of the configured folder are taken as they are; of the folder that the model was loaded
    from, unless model or tokenizer (``others``) have changed since.
    """
    trusted = config.trust_remote_code
    if config.assets is not None:
        return checkpoint.read_assets(config.assets, trusted=trusted)
    if not isinstance(model, nn.Module):
        return checkpoint.read_assets(config.base, trusted=trusted) if config.base else {}
    refuse_other_config(model)
    whole = unwrapped(model)
    folder = config.base or origin(whole)
    if folder is None:
        files = kept_files.saved(*kept_files.own_parts(whole), *others, trusted=trusted)
        if CONFIG_FILE in files:
            files[CONFIG_FILE] = kept_files.with_architecture(files[CONFIG_FILE], whole)
        return files
    files = checkpoint.read_assets(folder, trusted=trusted)
    now = kept_files.with_touched(files, folder, whole, *others, trusted=trusted)
    has_tokenizer = any(isinstance(one, kept_files.SavesItself) for one in others)
    old, new = _rows(files), _rows(now)
    if old != new and not has_tokenizer and not kept_files.MAIN_FILES.isdisjoint(now):
        logger.warning(
            "vocab_size is %s, and was %s in %s, whose tokenizer is published: if tokens were "
            "added, give PublishConfig.assets, a folder with the files of model and tokenizer",
            new,
            old,
            folder,
        )
    return now


def _rows(files: Mapping[str, bytes]) -> object:
    config = checkpoint.fields(files.get(CONFIG_FILE, b""))
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    return config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)


def checked(files: Mapping[str, bytes], config: PublishConfig) -> dict[str, bytes]:
    trusted, where = config.trust_remote_code, redacted_url(config.url)
    kept = {
        name: without_remote_code(name, data, trusted=trusted, where=where)
        for name, data in files.items()
    }
    return {name: data for name, data in kept.items() if data is not None}
