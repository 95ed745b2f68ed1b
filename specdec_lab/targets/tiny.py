"""The target ``tiny``: a random two-layer model with tokenizer and chat template, all built in code; for tests.

Its text is noise, but it is a whole target: grouped queries, an output layer padded beyond the tokenizer, a tokenizer
that adds BOS by itself and a chat template that writes BOS too.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from specdec_lab.errors import InputError
from specdec_lab.target import Exact, Target
from specdec_lab.targets import loading

MODEL = "random-llama-2x64"

PAD, BOS, EOS, USER, ASSISTANT = "<pad>", "<s>", "</s>", "<user>", "<assistant>"
SPECIALS = (PAD, BOS, EOS, USER, ASSISTANT)

# Frequent English letter pairs; with them a token is one or two bytes, so that stop strings cross token borders.
MERGES = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic "
    "ne ea ra ce li ch ll be ma si om ur Ġt Ġa Ġs Ġw Ġo Ġi"
)

VOCAB_SIZE = 320
"""Rows of the embedding and the output layer; the tokenizer has fewer ids, as padded models do."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def load_tiny(
    model: str | None = MODEL,
    dtype: loading.Dtype = "float32",
    device: str = "auto",
    revision: str | None = None,
    exact: Exact = "off",
    attention: loading.Attention = "auto",
    seed: Annotated[int, Field(ge=0)] = 0,
    max_positions: Annotated[int, Field(ge=8)] = 8192,
) -> Target:
    """Build the random target; the same seed gives the same weights on every device and transformers version.

    Args:
        model: nothing but ``random-llama-2x64``.
        dtype: as for ``specdec_lab.targets.hub.load_hub``.
        device: as for ``specdec_lab.targets.hub.load_hub``.
        revision: nothing; there are no revisions.
        exact: see ``specdec_lab.target.Target``.
        attention: as for ``specdec_lab.targets.hub.load_hub``.
        seed: seed of the weights.
        max_positions: most tokens of prompt and output.

    Raises:
        InputError: a setting that cannot be used.
    """
    if model not in (None, MODEL):
        raise InputError("target.model", model, f"this target is {MODEL}; for another use target=hf target.model=...")
    if revision is not None:
        raise InputError("target.revision", revision, "this target has no revisions; leave it null")
    loading.check_attention(attention)
    chosen_device = loading.choose_device(device)
    chosen_dtype = loading.choose_dtype(dtype, chosen_device)
    tokenizer = build_tokenizer()
    built = build_model(len(tokenizer), seed=seed, max_positions=max_positions)
    built.set_attn_implementation(loading.choose_attention(attention, built))
    built.to(device=chosen_device, dtype=chosen_dtype)  # pyright: ignore[reportCallIssue]
    return Target(built, tokenizer, name="tiny", exact=exact)


def build_model(used_ids: int, seed: int = 0, max_positions: int = 8192) -> PreTrainedModel:
    """Return a float32 Llama on the CPU: 2 layers, 4 query and 2 KV heads of 16; global random state stays as it is."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:  # norms stay at one; at this width greedy text repeats itself, but not for ever
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        model.get_output_embeddings().weight[used_ids:] = 0  # padding rows are never the largest
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that adds BOS, with a chat template that writes BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = MERGES.split()
    vocab = {token: index for index, token in enumerate((*SPECIALS, *alphabet, *pairs))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
