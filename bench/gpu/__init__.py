"""Checks on one NVIDIA GPU that has torch, Triton and transformers, without vLLM and without a network.

The machine needs Python 3.12, torch 2.11 or newer for CUDA, Triton, transformers, numba, typer, and of ROSE this
checkout and msgspec. Nothing is installed: a folder with msgspec's wheel, unpacked, and the checkout are on PYTHONPATH.

    PYTHONPATH=.gpu python3 -m bench.gpu --results results.jsonl --json gpu.json --seconds 440

`docs/benchmarks/results.md` (On a GPU) says how to fill the folder `.gpu` and how to go on after a run that was cut.
`--dry-run` runs every check on a CPU with tiny sizes, so that no line of a check runs on the GPU for the first time.
"""
