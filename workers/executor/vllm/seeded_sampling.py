"""Sampling of seeded turns by position.

Keeps true
- The token that a seeded turn samples depends on its seed, the position of the token in the whole sequence and the
  distribution, and on no earlier draw. A turn that is aborted and resumed by another executor therefore samples the
  same tokens as an uninterrupted turn.
- A turn whose prefill is not complete draws nothing from its generator. vLLM would draw, discard the token and set the
  generator back by an offset, which a CPU generator does not support: one chunked prefill would end the engine.

vLLM gives a seeded turn one generator, which advances by the size of the vocabulary with every token. An advance to
token k costs k vocabularies; a new seed for each token costs about a microsecond.
"""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

MASK = 2**64 - 1


def seed_at(seed: int, position: int) -> int:
    """Return the seed of one draw: output number `position` of SplitMix64 with the start value `seed`."""
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 31)


def draw_by_position(runner: Any) -> None:
    """Patch one model runner to sample seeded turns by position; another engine in the process is not changed.

    Does nothing to vLLM's second model runner (GPUs with Triton), which hashes seed and position by itself.
    """
    if not isinstance(runner, GPUModelRunner):
        return
    sample_tokens = runner.sample_tokens

    def sample(grammar_output: Any) -> Any:
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs]
        spared = {row: batch.generators.pop(row) for row in list(batch.generators) if unfinished[row]}
        for row, generator in batch.generators.items():
            seed = runner.requests[batch.req_ids[row]].sampling_params.seed
            generator.manual_seed(seed_at(seed, int(batch.num_tokens_no_spec[row])))
        try:
            return sample_tokens(grammar_output)
        finally:
            batch.generators.update(spared)

    runner.sample_tokens = sample
