"""Seeded turns draw by position.

Keeps true
- What a seeded turn draws depends on its seed, the place of the token in the whole sequence and the distribution there,
  and on nothing that was drawn before. So a turn that is broken off and goes on elsewhere, behind a context that holds
  what it had sampled, draws what it would have drawn unbroken.
- A turn whose prefill is not done yet draws nothing from its generator. vLLM lets it draw, throws the token away and
  turns the generator back by an offset, which a CPU generator has not: one cut prefill would end the engine.

vLLM gives a seeded turn one generator, which moves on by a vocabulary of numbers with every token. To move it on to
token k costs k vocabularies; to seed it anew for each token costs about a microsecond.
"""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

MASK = 2**64 - 1


def seed_at(seed: int, position: int) -> int:
    """The seed of one draw: SplitMix64's output number `position` of the stream that begins at `seed`."""
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 31)


def draw_by_position(runner: Any) -> None:
    """Make this model runner's seeded turns draw so; another engine in the process is untouched.

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
