"""Tokenizer and model of the demo, created without a download.

The model is a Qwen3 with tied embeddings, so that it trains in TRL and loads in any engine.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.demo.corpus import documents

VOCABULARY: Final = 512
"""Rows of the embedding, an upper bound of the tokenizer's vocabulary."""

CONTEXT: Final = 512

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
_SPECIAL: Final = (PAD, EOS, BOS)
_TAUGHT_DOCUMENTS: Final = 2000


def make_tokenizer(texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer in which each digit is a token.

    Args:
        texts: Training texts; the demo's corpus by default.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    taught = documents(seed=0) if texts is None else texts
    tokenizer.train_from_iterator(islice(taught, _TAUGHT_DOCUMENTS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Create a Qwen3 of 5.5 million random fp32 parameters, determined by the seed."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=_SPECIAL.index(PAD),
        eos_token_id=_SPECIAL.index(EOS),
        bos_token_id=_SPECIAL.index(BOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_checkpoint(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
