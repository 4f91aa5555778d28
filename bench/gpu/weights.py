"""Measure how a new policy version reaches the weights with which a GPU computes."""

import gc
import mmap
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from bench.gpu.card import Card, card_of
from bench.gpu.report import Report, require
from rose.workers.executor.ipc.shared_memory import create_sealed_memory
from rose.workers.executor.vllm.in_place_weights import PIECE_BYTES, InPlaceWeights

SHARES = 0.001, 0.01, 0.05
"""Shares of the weights that an update changes."""

DELTA_MS = 10.0
"""Bound of the write of the largest delta of the 8B policy: about the time of a few decode steps."""


def slab_copies(report: Report) -> None:
    """C: decides how an engine on a GPU loads a version from shared memory: pinned or not, and in which pieces.

    Rows: rate, blocked time of the host and longest piece of copies from a memfd, from a memfd that is registered with
    CUDA, and from pinned memory; then times and bytes of versions that the product writes in place into a model of
    transformers, from pageable memory. The logits must equal the logits of a model into which the version was copied.
    """
    card = card_of(report)
    size = card.size(1_192 << 20, 3 << 20)  # Qwen3-0.6B in bfloat16
    slab, registered = _memfd(size), _memfd(size)
    if not card.dry:
        code = torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
        report.row(cudaHostRegister=int(code), is_pinned=registered.is_pinned())
    sources = {
        "memfd": slab,
        "memfd, registered": registered,
        "pinned": torch.full((size,), 1, dtype=torch.uint8, pin_memory=not card.dry),
    }
    target = torch.empty(size, dtype=torch.uint8, device=card.device)
    for name, source in sources.items():
        for piece in (size, PIECE_BYTES):
            report.row(source=name, piece_bytes=piece, **_copied(card, source, target, piece))
    if not card.dry:
        torch.cuda.cudart().cudaHostUnregister(registered.data_ptr())  # type: ignore[no-untyped-call]
    del target
    _in_place(report, card)


def _memfd(size: int) -> Tensor:
    """Return memory filled with ones, of the kind that the executor and its engine share."""
    tensor = torch.frombuffer(mmap.mmap(create_sealed_memory(size, "version"), size), dtype=torch.uint8)
    return tensor.fill_(1)


def _copied(card: Card, source: Tensor, target: Tensor, piece: int) -> dict[str, float]:
    """Return rate, blocked time of the host and longest piece of the fastest of three copies on another stream."""
    copies = []
    for _ in range(3):
        stream, held = card.stream(), []
        card.wait()
        began = time.perf_counter()
        with card.on(stream):
            for to, origin in zip(torch.split(target, piece), torch.split(source, piece), strict=True):
                at = time.perf_counter()
                to.copy_(origin, non_blocking=True)
                held.append(time.perf_counter() - at)
        launched = time.perf_counter() - began
        card.wait()
        seconds = time.perf_counter() - began
        rate = source.numel() / seconds / 1e9
        copies.append({"gb_s": rate, "host_held_ms": 1000 * launched, "longest_piece_ms": 1000 * max(held)})
    return max(copies, key=itemgetter("gb_s"))


def _in_place(report: Report, card: Card) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape: dict[str, Any] = card.size(
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    )
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096)
    with torch.device(card.device):
        model, reference = (AutoModelForCausalLM.from_config(config, dtype=card.dtype).eval() for _ in range(2))
    weights = InPlaceWeights(_Loadable(model))
    version = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    off = 0.0
    for share in (*SHARES, 1.0):
        before = version
        version = {
            name: torch.where(torch.rand(tensor.shape) < share, torch.randn_like(tensor) * 0.02, tensor)
            for name, tensor in version.items()
        }
        report.row(changed=share, **_swapped(card, weights, version))
        off = max(off, _logits_off(card, model, reference, version))
        weights.undo(partial(dict, before))
        off = max(off, _logits_off(card, model, reference, before))
        _swapped(card, weights, version)
    report.check("in_place_logits_off", off, "", 0, "a model into which the version was copied, also after an undo")


class _Loadable(torch.nn.Module):
    """A model with a loader, as vLLM's models have."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def load_weights(self, tensors: Any) -> None:
        """Load tensors by name."""
        _load_named(self.inner, tensors)


def _swapped(card: Card, weights: InPlaceWeights, version: dict[str, Tensor]) -> dict[str, float]:
    """Stage and activate a version; return what it took."""
    pieces, at = [], time.perf_counter()
    for _ in weights.stage(version):
        pieces.append(time.perf_counter() - at)
        at = time.perf_counter()
    pieces.append(time.perf_counter() - at)
    card.wait()
    found, began = weights.staged_bytes, time.perf_counter()
    weights.activate()
    return {
        "pieces": len(pieces),
        "staged_ms": 1000 * sum(pieces),
        "longest_piece_ms": 1000 * max(pieces),
        "written_bytes": found.written,
        "from_host_bytes": found.left,
        "activate_ms": 1000 * (time.perf_counter() - began),
    }


@torch.no_grad()
def _logits_off(card: Card, model: Any, reference: Any, version: dict[str, Tensor]) -> float:
    """Return how far the model's logits are from those of a model into which the version is copied."""
    tokens = torch.arange(64, device=card.device)[None]
    _load_named(reference, version.items())
    right = reference(input_ids=tokens, use_cache=False).logits
    return float((model(input_ids=tokens, use_cache=False).logits - right).abs().max())


def _load_named(model: Any, tensors: Any) -> None:
    """Copy tensors into parameters of the same names, as a loader of vLLM does."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        parameters[name].copy_(tensor)


def inplace_delta(report: Report) -> None:
    """D: decides whether a version is written in place between two steps, instead of into spare weights.

    A Triton kernel writes 0.1, 1 and 5 % of the words of policies of 0.6B and 8B, at random ascending positions, and
    then the old words; wrong words are counted. Rows: device time of the kernel, of torch's indexed write, and of the
    copy of a delta from pinned memory.
    """
    card, scatter = card_of(report), require("bench.gpu.word_kernels").scatter
    wrong = 0
    for name, words in card.size({"0.6B": 596_049_920, "8B": 8_190_735_360}, {"tiny": 40_000}).items():
        held = torch.randint(-(1 << 15), 1 << 15, (words,), dtype=torch.int16, device=card.device)
        before = held.clone()
        for share in SHARES:
            stride = int(1 / share)
            count = words // stride
            positions = torch.arange(count, device=card.device).mul_(stride)
            positions += torch.randint(stride, (count,), device=card.device)
            old = held[positions]
            new = old ^ 1
            scatter(held, positions, new)
            wrong += abs(_differing(held, before) - count) + _differing(held[positions], new)
            scatter(held, positions, old)
            wrong += _differing(held, before)
            row = {
                "scatter_ms": max(card.milliseconds(_in_turn(scatter, held, positions, (new, old)))),
                "torch_ms": max(card.milliseconds(_in_turn(_put, held, positions, (new, old)), 4)),
            }
            held.copy_(before)
            if share < max(SHARES):  # the largest delta of 8B would need 4 GB of pinned memory
                row["from_host_ms"] = _from_host_ms(card, positions, new)
            report.row(policy=name, share=share, **row)
            if name == "8B" and share == max(SHARES):
                report.check("scatter_8b", row["scatter_ms"], "ms", DELTA_MS, "a swap of a few decode steps, 5 % of 8B")
            del positions, old, new
        del held, before
        gc.collect()
    report.check("wrong_words", wrong, "words", 0, "the words of the delta, and of the version before after its undo")


def _in_turn(
    write: Callable[[Tensor, Tensor, Tensor], None], words: Tensor, positions: Tensor, values: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """Return a function that writes the two deltas in turn."""
    turns = cycle(values)
    return lambda: write(words, positions, next(turns))


def _put(words: Tensor, positions: Tensor, values: Tensor) -> None:
    words[positions] = values


def _differing(one: Tensor, other: Tensor) -> int:
    """Return the number of unequal words; pieces bound the memory of the comparison."""
    pieces = zip(torch.split(one, 1 << 28), torch.split(other, 1 << 28), strict=True)
    return int(sum(torch.count_nonzero(a != b) for a, b in pieces))


def _from_host_ms(card: Card, positions: Tensor, values: Tensor) -> float:
    """Return the device time of a copy of positions and words from pinned memory."""
    pairs = [
        (torch.empty_like(each, device="cpu", pin_memory=not card.dry).copy_(each), torch.empty_like(each))
        for each in (positions, values)
    ]
    return min(card.milliseconds(lambda: [to.copy_(host, non_blocking=True) for host, to in pairs], 3))
