"""The benchmarks that `docs/benchmarks/results.md` comes from."""
