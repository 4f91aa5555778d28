"""A lender: a vLLM server in whose engine-core process a rollout engine is a guest."""
