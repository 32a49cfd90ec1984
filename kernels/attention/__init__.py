"""Attention over a paged KV cache: decode, mixed prefill and decode, and latent (MLA) decode."""
