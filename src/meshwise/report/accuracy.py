"""`docs/accuracy.md`: how wrong the model is, generated from the measurements by `meshwise validate`.

Rows are split in halves by a hash of their id: constants are fitted on one, the other only judges, and
both are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.calibrate.validate import Validation
from meshwise.core.files import make_folder, write_text
from meshwise.report.accuracy_plot import LABELS, draw_accuracy
from meshwise.report.accuracy_table import (
    Table,
    coverage_text,
    error_table,
    group_tables,
    lead_table,
    order_text,
    reasons_table,
    worst_table,
)

FIGURE = "accuracy_{}.png"
NUM_WORST = 10

_HEAD = """\
# Accuracy

How far predictions are from published measurements. Check it yourself, or with runs of your own
([data.md](data.md)):

```
meshwise validate
meshwise validate --runs my_runs.csv --json
```

The error of a row is (predicted - measured) / measured; the table shows the median and the mean of its size,
*bias* is its own mean. The *left-out* columns are the honest ones for a run of yours: each source (a
repository or a paper) is predicted from constants that were fitted to the other sources. *In interval* is the
share of measurements between the p10 and p90 that `estimate` prints, taken from the other sources too; it
should be 80 %. The same configuration measured twice differs by about 3 %.

One set of constants per generation of chips, kind of link and software serves all rows; none belongs to a row
or a source. The few of `catalog/overheads.toml` are fitted on half of the rows (by a hash of their id), and
only those that at least two sources determine; the *held-out* half judges. A constant starts from a physical
guess, and a source that is off as a whole has a shift of its own, so that one source alone moves it little.
`meshwise fit --only steps` fits them again;
`meshwise validate --data DIR --leave-one-source-out --write-docs docs` writes this page.
"""

_GAPS = """\
## What is missing

The largest errors have known causes that the model does not hold:

- *Experts across nodes.* Dispatchers like DeepEP send tokens in fp8; we send them in bf16. Several nodes of
  eight GPUs are predicted too slow.
- *Narrow weights.* Under fp8 and fp4, Transformer Engine and torchao may gather weights in the narrow type
  too; we gather them in bf16 (activations are gathered as narrow as the matmuls read them).
- *Whole iterations in a CUDA graph.* One source measured them, so their kernels are priced as without a
  graph, and only the waits for the host are gone.
- *NVFP4, Blackwell Ultra, MI300X.* One source each: their power figures are stated, not fitted.
- *Small experts.* Mixture-of-experts runs with a microbatch of one sequence wait for the host far longer
  than one constant says; runs of GPT-OSS are faster here than anywhere, and we do not know why.
- *ZeRO-3 of 2021.* Gathers of single tensors over more than a thousand ranks took twice what rings explain.
- *fp8 in PyTorch.* Scales per tensor and per row are computed by kernels that differ from release to
  release; chips that are "power limited" do not say to how many watts.
- *One iteration.* The runs before BLOOM are single second iterations; equal plans differ there by up to a
  quarter.
"""


def write_accuracy(validation: Validation, folder: Path) -> None:
    """Write `accuracy.md` and `figures/accuracy_*.png` into `folder`."""
    make_folder(folder / "figures")
    runs = [quantity for quantity in ("step_s", "memory_bytes") if quantity in validation.quantities]
    ops = [q for q in validation.quantities if q in LABELS and q not in runs]
    figures: list[str] = []
    for name, quantities in (("runs", runs), ("ops", ops)):
        part = Validation([row for row in validation.rows if row.quantity in quantities])
        if any(row.expressed for row in part.rows):
            draw_accuracy(part, folder / "figures" / FIGURE.format(name))
            figures.append(f"![predicted against measured](figures/{FIGURE.format(name)})")
    lead = [replace(row, predicted=row.left_out) for row in validation.of("step_s") if row.left_out]
    if lead:
        draw_accuracy(Validation(lead), folder / "figures" / FIGURE.format("left_out"))
        figures.insert(
            0, f"![step times predicted by the other sources](figures/{FIGURE.format('left_out')})"
        )
    write_text(folder / "accuracy.md", accuracy_markdown(validation, figures))


def accuracy_markdown(validation: Validation, figures: Sequence[str] = ()) -> str:
    """The page as text: step times in one table and one figure, then every quantity."""
    by_quantity = [(LABELS.get(name, name), validation.of(name)) for name in validation.quantities]
    lines = [_HEAD, *_markdown(lead_table(validation.of("step_s"))), *figures[:1], ""]
    lines += ["## Every quantity", "", *_markdown(error_table("all rows", by_quantity)), *figures[1:], ""]
    for label, rows in by_quantity:
        lines += [f"## {label}", ""]
        for table in (*group_tables(rows), worst_table(rows, NUM_WORST)):
            lines += _markdown(table)
        lines += [line for text in (coverage_text(rows), order_text(rows)) if text for line in (text, "")]
    lines += ["## Rows that are not expressed", "", *(_markdown(reasons_table(validation.rows)))]
    return "\n".join([*lines, _GAPS.rstrip()]) + "\n"


def _markdown(table: Table) -> Iterator[str]:
    def line(values: Sequence[object]) -> str:
        return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"

    if not table.rows:
        yield from ("None.", "")
        return
    yield line(table.columns)
    yield "|" + "|".join(" --- " for _ in table.columns) + "|"
    yield from map(line, table.rows)
    yield ""
