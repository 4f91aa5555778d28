"""The benchmarks that `docs/figures.md` comes from."""
