"""Writes the README's tables, its pictures and docs/RESULTS.md from benchmarks/results; or checks them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from result_tables.front import make_section, put_section
from result_tables.lossless import lossless_section
from result_tables.pictures import depth_picture, speed_picture
from result_tables.precisions import precisions_section
from result_tables.quality import answers_section, calibration_section
from result_tables.results import Result, TablesError, read_results
from result_tables.speed import bench_results, speed_section
from result_tables.vllm import vllm_section

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "RESULTS.md"
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Results

Made by `make docs` from the files in [benchmarks/results](../benchmarks/results); not to be edited by hand.
[CALIBRATION.md](CALIBRATION.md) says how plans are made, and [the terms](DESIGN.md#terms) what each figure counts."""


def make_document(results: dict[str, list[Result]]) -> str:
    sections = {
        "Decoding speed": speed_section(bench_results(results["bench"])),
        "Calibrated plans": calibration_section(results["calibrate"]),
        "Answers to tasks": answers_section(results["eval"]),
        "Lossless mode": lossless_section(results["lossless"], results["steps"], results["texts"]),
        "On a CPU": precisions_section(results["precisions"]),
        "Inside vLLM": vllm_section(results["vllm"], results["vllm ways"]),
    }
    parts = [HEAD, *(f"## {title}\n\n" + "\n".join(lines).strip() for title, lines in sections.items())]
    return "\n\n".join(parts) + "\n"


def make_documents(results: dict[str, list[Result]], readme: Path, document: Path) -> dict[Path, str]:
    """What each file should hold. Pictures lie beside the document, where there are results to draw."""
    bench, texts = bench_results(results["bench"]), results["texts"]
    made = {
        readme: put_section(readme.read_text(encoding="utf-8"), make_section(bench, texts, results["eval"])),
        document: make_document(results),
    }
    pictures = {"speed.svg": speed_picture(bench, texts), "depth.svg": depth_picture(bench)}
    return made | {document.with_name(name): drawn for name, drawn in pictures.items() if drawn}


def write_whole(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a document is stale")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="where all results go; pictures lie beside it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        results = read_results(options.results)
        wanted = make_documents(results, options.readme, options.document)
        stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        for path in stale:
            if options.check:
                print(f"{path.name}: it does not match the result files; run: make docs", file=sys.stderr)
            else:
                write_whole(path, wanted[path])
                print(f"{path.name}: written from the result files")
    except (TablesError, OSError) as error:
        print(f"make_tables: {error}", file=sys.stderr)
        return 2
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
