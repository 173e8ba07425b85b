"""Run every benchmark of this folder and print one line a figure: `python -m benchmarks [name ...]`.

`python -m benchmarks gpu OUT` measures the GPU of this machine instead (`gpu.py`).
"""

import importlib
import pkgutil
import sys

import benchmarks


def main() -> None:
    wanted = sys.argv[1:]
    if wanted[:1] == ["gpu"]:
        importlib.import_module("benchmarks.gpu").main(wanted[1:] or ["out/gpu"])
        return
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name.startswith("bench_") and (not wanted or module.name[6:] in wanted):
            print(f"== {module.name[6:]}")
            importlib.import_module(f"benchmarks.{module.name}").main()


main()
