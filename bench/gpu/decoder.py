"""A decoder of plain torch with the shapes of Qwen3, for measurements of time: random weights, no rotary embedding.

The decoders of transformers are not used: they copy values to the host to build masks, which a CUDA graph cannot
capture.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int


SMALL = Shape(1024, 3072, 28, 16, 8, 128, 151_936)
"""Shape of Qwen3-0.6B."""

LARGE = Shape(4096, 12_288, 36, 32, 8, 128, 151_936)
"""Shape of Qwen3-8B, except for its head, which is tied here."""

TINY = Shape(32, 64, 6, 4, 2, 8, 128)

Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer, (batch, kv_heads, context, head) each."""


class Layer(nn.Module):
    """Attention and MLP of one layer."""

    def __init__(self, shape: Shape, made: dict[str, Any]) -> None:
        super().__init__()
        self.split = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.head = shape.head
        self.before_attention = nn.RMSNorm(shape.hidden, eps=1e-6, **made)
        self.qkv = nn.Linear(shape.hidden, sum(self.split) * shape.head, bias=False, **made)
        self.out = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False, **made)
        self.before_mlp = nn.RMSNorm(shape.hidden, eps=1e-6, **made)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False, **made)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False, **made)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """Compute the layer for `x`, (batch, tokens, hidden). With a cache, `x` is the last token of the context."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, tokens, -1, self.head).transpose(1, 2)
        q, k, v = qkv.split(self.split, 1)
        if cache is not None:
            cache[0][:, :, -1:], cache[1][:, :, -1:] = k, v
            k, v = cache
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        added: Tensor = x + self.down(functional.silu(gate) * up)
        return added


class Decoder(nn.Module):
    """A causal decoder that returns the likeliest next token of each row."""

    def __init__(self, shape: Shape, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, **made)
        self.layers = nn.ModuleList(Layer(shape, made) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6, **made)
        self.requires_grad_(requires_grad=False)

    def caches(self, batch: int, context: int) -> list[Cache]:
        """Return zeroed caches of all layers."""
        like = self.embedding.weight
        size = batch, self.shape.kv_heads, context, self.shape.head
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in self.layers]

    def tokens(self, batch: int, length: int) -> Tensor:
        """Return random prompts, int64 (batch, length)."""
        return torch.randint(self.shape.vocabulary, (batch, length), device=self.embedding.weight.device)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Return the next tokens, int64 (batch,), of `tokens`, int64 (batch, length). With caches the length is 1."""
        x = self.embedding(tokens)
        for at, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[at])
        likeliest: Tensor = (self.norm(x[:, -1]) @ self.embedding.weight.T).argmax(-1)
        return likeliest
