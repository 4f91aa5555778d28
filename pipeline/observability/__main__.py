"""`python -m rose.pipeline.observability` in a checkout writes the generated pages of docs/ and deploy/dashboards/."""

from pathlib import Path

from rose.pipeline.observability.generated_files import generated_files

for name, content in generated_files().items():
    # Resolved: in a checkout the packages of `rose` are links.
    path = Path(__file__).resolve().parents[2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
