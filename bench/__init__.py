"""The benchmarks that produce the figures of `docs/benchmarks/results.md`."""
