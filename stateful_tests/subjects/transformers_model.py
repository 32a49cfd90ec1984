"""The tiny models that transformers' engine runs, and what they must find and compute.

See :mod:`kvproof.stateful_tests.subjects.transformers_scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_VOCABULARY = 64
SHAPE = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
WINDOW = 6
"""Tokens that the layer with a window looks back on, itself included: no multiple of most pages."""
_TOLERANCE = 1e-9
_OF_LOGITS = 1e-6
"""Tolerance of logits, which the engine rounds to 32 bits."""


class TinyModel:
    """A model in float64, and the same without engine and cache, to compare with."""

    def __init__(self, torch: Any, model: Any, windows: tuple[int, ...]) -> None:
        self.torch = torch
        self.model = model.to(torch.float64).eval()
        self.windows = windows
        """By layer; 0: it looks at everything."""
        self._kv: Any = torch.zeros(0)
        # A model of 64 tokens for prompts of any: it sees them modulo 64.
        embeddings = self.model.get_input_embeddings()
        embeddings.register_forward_pre_hook(lambda module, inputs: (inputs[0] % _VOCABULARY,))

    def foreign(self, tokens: Sequence[int], kv: Any) -> int | None:
        """The first position whose KV, in the first layer, is not that of its token.

        ``kv``: keys and values of the last positions, one after another.  In the first layer they
        depend on token and position only, so that what each should be is known.
        """
        if len(self._kv) < len(tokens):
            self._kv = self._kv_of_all(2 * len(tokens))
        first = len(tokens) - len(kv)
        rows = self.torch.arange(first, len(tokens))
        expected = self._kv[rows, self.torch.tensor(tokens[first:]) % _VOCABULARY]
        right = (kv - expected).abs() <= _TOLERANCE  # not so of what is not a number
        wrong = ~right.flatten(1).all(1)
        return first + int(wrong.nonzero()[0]) if wrong.any() else None

    def misled(self, sequences: Sequence[Sequence[int]], logits: Any) -> int | None:
        """The first sequence after which the logits are not those that the model computes of it.

        ``logits``: one row for each.  The model computes here without cache and indices, over
        sequences padded at the end, which causal attention does not see.
        """
        torch, lengths = self.torch, list(map(len, sequences))
        tokens = torch.zeros((len(sequences), max(lengths)), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : lengths[row]] = torch.tensor(sequence)
        model, last = self.model.model, torch.tensor(lengths) - 1
        with torch.no_grad():
            hidden = model.embed_tokens(tokens)
            rotation = model.rotary_emb(hidden, position_ids=torch.arange(max(lengths))[None])
            for layer, window in zip(model.layers, self.windows, strict=True):
                mask = self._mask(window, max(lengths))
                hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation)
            expected = self.model.lm_head(model.norm(hidden[torch.arange(len(lengths)), last]))
        wrong = ~((logits[: len(lengths)] - expected).abs() <= _OF_LOGITS).all(1)
        return int(wrong.nonzero()[0]) if wrong.any() else None

    def _mask(self, window: int, tokens: int) -> Any:
        """What each token may look at; None: at all before it."""
        if not window:
            return None
        positions = self.torch.arange(tokens)
        back = positions[:, None] - positions
        return ((back >= 0) & (back < window))[None, None]

    def _kv_of_all(self, positions: int) -> Any:
        """Keys and values of each token at each position, as the first layer computes them."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        torch, model = self.torch, self.model.model
        layer = model.layers[0]
        with torch.no_grad():
            tokens = torch.arange(_VOCABULARY).repeat(positions)
            hidden = layer.input_layernorm(model.embed_tokens(tokens))
            keys, values = layer.self_attn.k_proj(hidden), layer.self_attn.v_proj(hidden)
            places = torch.arange(positions).repeat_interleave(_VOCABULARY)
            cosines, sines = model.rotary_emb(values, position_ids=places[None])
            _, keys = apply_rotary_pos_emb(keys[None, None], keys[None, None], cosines, sines)
            kv = torch.stack((keys[0, 0], values), 1)
        return kv.view(positions, _VOCABULARY, 2, -1)
