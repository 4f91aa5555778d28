"""Checks on one NVIDIA GPU that has torch, Triton and transformers, without a network.

The machine needs Python 3.12, torch 2.11 or newer for CUDA, Triton, transformers, numba, typer, cuda-bindings, this
checkout and msgspec, and up to 50 GB of GPU memory. If msgspec cannot be installed there, put its wheel into the folder
`.gpu` of the checkout, which git ignores:

    python -m pip install --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 --target .gpu 'msgspec>=0.22,<0.23'

One check, M, needs vLLM and the packages of ROSE too, and is unavailable without them.

    PYTHONPATH=.gpu python3 -m bench.gpu --results results.jsonl --json gpu.json --seconds 440

What the checks print goes to `results.log`. A second run with the same `results.jsonl` skips the checks that are done
and repeats failed checks last. `--dry-run` runs the checks on a CPU with tiny sizes, to find errors in their code
before a GPU is used.
"""
