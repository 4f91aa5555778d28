"""Checks on one NVIDIA GPU that has torch, Triton and transformers, without vLLM and without a network.

The machine needs Python 3.12, torch 2.11 or newer for CUDA, Triton, transformers, numba, typer, this checkout and
msgspec. Nothing is installed: PYTHONPATH has the folder `.gpu` with msgspec's unpacked wheel.

    PYTHONPATH=.gpu python3 -m bench.gpu --results results.jsonl --json gpu.json --seconds 440

`docs/benchmarks/results.md` (On a GPU) explains how to fill the folder `.gpu` and how to continue an interrupted run.
`--dry-run` runs the checks on a CPU with tiny sizes, to find errors in their code before a GPU is used.
"""
