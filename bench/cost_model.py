"""Measures the error of the cost model on latencies that were measured on real cards and that it was not fitted to.

    python -m bench.cost_model --rows silicon_sample.csv

`silicon_sample.csv` is part of NVIDIA's aiconfigurator 0.11.

Keeps true
- The checks are of Qwen3-32B in bfloat16 on H100 cards with vLLM 0.12. The other rows have no bound.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.check import Check, keep, options
from rose.pipeline.simulation.calibration import Calibration, Errors, calibrate, read_rows
from rose.pipeline.simulation.cost_model import read_profile

MOST_MEDIAN, MOST_P90 = 0.05, 0.12

QWEN3_32B = tuple(f"qwen3-32b-h100-tp{size}" for size in (2, 4, 8))


@dataclass(frozen=True)
class Case:
    """Rows of one model, card and engine, and the profiles that predict them."""

    name: str
    profiles: tuple[str, ...]
    where: dict[str, str]
    factors: bool = False


CHECKED = Case(
    "Qwen3-32B, vLLM 0.12, bf16",
    QWEN3_32B,
    {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "backend": "vllm", "mode": "agg", "gemm_quant_mode": ""},
)

OTHERS = (
    Case(
        "Llama-3.1-8B, TensorRT-LLM 1.0, by the profile of Qwen3-8B",
        ("qwen3-8b-h100-tp1",),
        {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm", "backend": "trtllm"},
    ),
    Case("Qwen3-32B, SGLang 0.5, bf16", QWEN3_32B, CHECKED.where | {"backend": "sglang"}),
    Case("Qwen3-32B, SGLang 0.5, bf16, with factors", QWEN3_32B, CHECKED.where | {"backend": "sglang"}, True),
    Case(
        "Qwen3-32B, TensorRT-LLM 1.0, fp8, with factors",
        QWEN3_32B,
        CHECKED.where | {"backend": "trtllm", "gemm_quant_mode": "fp8"},
        True,
    ),
)


def calibration(case: Case, file: Path) -> Calibration:
    """Return the calibration of a case's profiles with its rows."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = read_rows(lines, str(file), case.where)
    return calibrate([read_profile(name) for name in case.profiles], rows, factors=case.factors)


def checks(found: Calibration) -> list[Check]:
    """Return the checks: rows held out, and the worst of the tensor parallel sizes held out."""
    held = found.held_out
    sizes = found.without_size
    return [
        _check("median", held.median, MOST_MEDIAN, "rows held out", rows=held.rows, bias=held.bias),
        _check("p90", held.p90, MOST_P90, "rows held out", rows=held.rows, largest=held.largest),
        _check("other_tp_median", max(each.median for each in sizes.values()), MOST_MEDIAN, "the worst size held out"),
        _check("other_tp_p90", max(each.p90 for each in sizes.values()), MOST_P90, "the worst size held out"),
    ]


def _check(name: str, value: float, bound: float, against: str, **details: float) -> Check:
    rounded = {key: round(each, 4) for key, each in details.items()}
    return Check(name, value, "relative error", bound, "max", f"measured TPOT, {against}", rounded)


def _row(name: str, errors: Errors) -> dict[str, str | float]:
    return {"rows": name, "count": errors.rows, "median": errors.median, "p90": errors.p90, "largest": errors.largest}


def main() -> None:
    """Print the checks and the errors on the other rows."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="silicon_sample.csv of aiconfigurator")
    arguments = parser.parse_args()
    found = calibration(CHECKED, arguments.rows)
    measured = checks(found)
    table = [_row(CHECKED.name, found.held_out)]
    table += [_row(f"{CHECKED.name}, without TP {size}", errors) for size, errors in found.without_size.items()]
    table += [_row(case.name, calibration(case, arguments.rows).held_out) for case in OTHERS]
    if not keep({"checks": measured, "fit": found.fit, "rows": table}, arguments.json):
        print(*measured, sep="\n")
        for row in table:
            print(f"{row['rows']}: {row['count']} rows, median {row['median']:.1%}, p90 {row['p90']:.1%}")


if __name__ == "__main__":
    main()
