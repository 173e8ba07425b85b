"""Run every benchmark of this folder and print one line a figure: `python -m benchmarks [name ...]`."""

import importlib
import pkgutil
import sys

import benchmarks


def main() -> None:
    wanted = sys.argv[1:]
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name.startswith("bench_") and (not wanted or module.name[6:] in wanted):
            print(f"== {module.name[6:]}")
            importlib.import_module(f"benchmarks.{module.name}").main()


main()
