"""BERT, GPT-2 and an LSTM language model as layers, named as Hugging Face's and PyTorch's code name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .layers import (
    ACTIVATION,
    DROPOUT,
    NORM,
    SUM,
    Layer,
    NetworkStep,
    Parameters,
    Passes,
    Work,
    elementwise,
    embedding,
    linear,
    network_step,
    norm,
    product,
)

_SCORES: Passes = (9, 8)
"""Attention scores: scaled (2 passes), masked (2), softmax (2), dropout (3); backward dropout (3), softmax (3), scaled
(2)."""


def _attended(tokens: int, hidden: int, heads: int) -> list[Layer]:
    """Queries by keys, softmax, scores by values; no parameters."""
    return [
        product((), 2.0 * tokens**2 * hidden),
        elementwise(heads * tokens**2, _SCORES),
        product((), 2.0 * tokens**2 * hidden),
    ]


# --- BERT -------------------------------------------------------------------------------------------------------------

_BERT_WORDS, _BERT_POSITIONS, _BERT_TYPES = 30522, 512, 2
_PREDICTED = 20
"""Masked tokens of a sequence of 128 that are predicted, as in pre-training (max_predictions_per_seq)."""


def bert_base() -> NetworkStep:
    """BERT-base in pre-training, sequences of 128 tokens."""
    return bert(12, 768, 12, 128)


def bert_large() -> NetworkStep:
    """BERT-large in pre-training, sequences of 128 tokens."""
    return bert(24, 1024, 16, 128)


def bert(blocks: int, hidden: int, heads: int, tokens: int) -> NetworkStep:
    """BERT with its two pre-training heads (Devlin et al. 2018, arXiv:1810.04805); the word embedding is tied."""
    layers = [*_bert_embeddings(hidden, tokens)]
    for block in range(blocks):
        layers += _bert_block(f"bert.encoder.layer.{block}", hidden, heads, tokens)
    return network_step([*layers, *_bert_heads(hidden)])


def _bert_embeddings(hidden: int, tokens: int) -> Iterator[Layer]:
    at = "bert.embeddings"
    tables = (("word", _BERT_WORDS), ("position", _BERT_POSITIONS), ("token_type", _BERT_TYPES))
    parameters = tuple((f"{at}.{what}_embeddings.weight", (rows, hidden)) for what, rows in tables)
    yield embedding(parameters, len(tables) * tokens, hidden)
    yield norm(f"{at}.LayerNorm", hidden, tokens * hidden, DROPOUT)


def _bert_block(at: str, hidden: int, heads: int, tokens: int) -> Iterator[Layer]:
    for what in ("query", "key", "value"):
        yield linear(f"{at}.attention.self.{what}", hidden, hidden, tokens)
    yield from _attended(tokens, hidden, heads)
    yield linear(f"{at}.attention.output.dense", hidden, hidden, tokens)
    yield norm(f"{at}.attention.output.LayerNorm", hidden, tokens * hidden, DROPOUT, SUM)
    yield linear(f"{at}.intermediate.dense", 4 * hidden, hidden, tokens)
    yield elementwise(4 * hidden * tokens, ACTIVATION)
    yield linear(f"{at}.output.dense", hidden, 4 * hidden, tokens)
    yield norm(f"{at}.output.LayerNorm", hidden, tokens * hidden, DROPOUT, SUM)


def _bert_heads(hidden: int) -> Iterator[Layer]:
    yield linear("bert.pooler.dense", hidden, hidden)
    yield linear("cls.predictions.transform.dense", hidden, hidden, _PREDICTED)
    yield norm("cls.predictions.transform.LayerNorm", hidden, _PREDICTED * hidden, ACTIVATION)
    yield _tied("cls.predictions.bias", _BERT_WORDS, hidden, _PREDICTED)
    yield elementwise(_PREDICTED * _BERT_WORDS, NORM)  # log-softmax: its passes are a normalisation's
    yield linear("cls.seq_relationship", 2, hidden)


def _tied(bias: str | None, words: int, hidden: int, rows: int) -> Layer:
    """The product with an embedding that yields the scores of all words. The embedding itself is in the first layer:
    its gradient is ready when both uses of it are behind."""
    parameters: Parameters = () if bias is None else ((bias, (words,)),)
    return product(parameters, 2.0 * words * hidden * rows, words * hidden)


# --- GPT-2 ------------------------------------------------------------------------------------------------------------

_GPT_WORDS, _GPT_POSITIONS, _GPT_BLOCKS, _GPT_HIDDEN, _GPT_HEADS = 50257, 1024, 12, 768, 12
_GPT_TOKENS = 80


def gpt2() -> NetworkStep:
    """The smallest GPT-2 (Radford et al. 2019) on sequences of 80 tokens; the word embedding is tied."""
    tables: Parameters = (
        ("transformer.wte.weight", (_GPT_WORDS, _GPT_HIDDEN)),
        ("transformer.wpe.weight", (_GPT_POSITIONS, _GPT_HIDDEN)),
    )
    elements = _GPT_TOKENS * _GPT_HIDDEN
    layers = [embedding(tables, 2 * _GPT_TOKENS, _GPT_HIDDEN), elementwise(elements, SUM, DROPOUT)]
    for block in range(_GPT_BLOCKS):
        layers += _gpt_block(f"transformer.h.{block}")
    layers += [norm("transformer.ln_f", _GPT_HIDDEN, elements), _tied(None, _GPT_WORDS, _GPT_HIDDEN, _GPT_TOKENS)]
    return network_step([*layers, elementwise(_GPT_TOKENS * _GPT_WORDS, NORM)])


def _gpt_block(at: str) -> Iterator[Layer]:
    hidden, elements = _GPT_HIDDEN, _GPT_TOKENS * _GPT_HIDDEN
    yield norm(f"{at}.ln_1", hidden, elements)
    yield linear(f"{at}.attn.c_attn", 3 * hidden, hidden, _GPT_TOKENS, transposed=True)
    yield from _attended(_GPT_TOKENS, hidden, _GPT_HEADS)
    yield linear(f"{at}.attn.c_proj", hidden, hidden, _GPT_TOKENS, transposed=True)
    yield elementwise(elements, DROPOUT, SUM)
    yield norm(f"{at}.ln_2", hidden, elements)
    yield linear(f"{at}.mlp.c_fc", 4 * hidden, hidden, _GPT_TOKENS, transposed=True)
    yield elementwise(4 * elements, ACTIVATION)
    yield linear(f"{at}.mlp.c_proj", hidden, 4 * hidden, _GPT_TOKENS, transposed=True)
    yield elementwise(elements, DROPOUT, SUM)


# --- LSTM -------------------------------------------------------------------------------------------------------------

_LSTM_WORDS, _LSTM_HIDDEN, _LSTM_LAYERS, _LSTM_TOKENS = 33278, 1500, 2, 80
"""WikiText-2's words; the large model of Zaremba et al. 2014 (arXiv:1409.2329), as in PyTorch's word_language_model."""

_GATES = 4
_CELL = Layer((), Work(traffic=4.0 * 11), Work(traffic=4.0 * 17))
"""A unit in one time step, bytes: four gates and their sums are read and written, and the cell; backward once more and
their gradients."""


def lstm() -> NetworkStep:
    """A language model of two LSTM layers on sequences of 80 tokens; the word embedding is tied (Press and Wolf 2016,
    arXiv:1608.05859)."""
    table: Parameters = (("encoder.weight", (_LSTM_WORDS, _LSTM_HIDDEN)),)
    elements = _LSTM_TOKENS * _LSTM_HIDDEN
    return network_step(
        [
            embedding(table, _LSTM_TOKENS, _LSTM_HIDDEN),
            elementwise(elements, DROPOUT),
            _recurrent(),
            elementwise(elements, DROPOUT),
            _tied("decoder.bias", _LSTM_WORDS, _LSTM_HIDDEN, _LSTM_TOKENS),
            elementwise(_LSTM_TOKENS * _LSTM_WORDS, NORM),
        ]
    )


def _recurrent() -> Layer:
    """All layers at once: cuDNN yields their gradients by one call. The recurrent matrix is read in every time step."""
    hidden, gates = _LSTM_HIDDEN, _GATES * _LSTM_HIDDEN
    parameters = tuple(
        (f"rnn.{what}_l{layer}", shape)
        for layer in range(_LSTM_LAYERS)
        for what, shape in (
            ("weight_ih", (gates, hidden)),
            ("weight_hh", (gates, hidden)),
            ("bias_ih", (gates,)),
            ("bias_hh", (gates,)),
        )
    )
    cells = _LSTM_LAYERS * _LSTM_TOKENS * hidden
    again = Work(weights=4.0 * _LSTM_LAYERS * (_LSTM_TOKENS - 1) * gates * hidden)
    layer = product(parameters, 2.0 * _LSTM_LAYERS * _LSTM_TOKENS * gates * 2 * hidden)
    return replace(
        layer,
        forward=layer.forward + _CELL.forward * cells + again,
        backward=layer.backward + _CELL.backward * cells + again,
    )
