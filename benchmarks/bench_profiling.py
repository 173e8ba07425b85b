"""What capturing costs and how fast traces are read, on this machine.

Run: python -m benchmarks profiling

Capture: the time of one small matrix product (five profiler events) bare and under the capture, its start
and its end; then training steps of a small MLP, bare and captured in turns. Reading: a synthetic trace of
the given size, in the layout that Kineto writes, read in a process of its own. All in CPU time of one
thread, so that what else the machine does counts little.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_READ = """
import re, sys, time
from pathlib import Path
from meshwise.trace.read import read_trace
begin = time.process_time()
trace, notes = read_trace(Path(sys.argv[1]))
seconds = time.process_time() - begin
peak_kb = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
print(seconds, len(trace), int(peak_kb) * 1.024e-6)
"""


def capture_overhead() -> None:
    """Print the cost of a small operator bare and captured, and of starting and ending a capture."""
    import torch

    from meshwise.runtime.capture import Capture

    torch.set_num_threads(1)
    x = torch.randn(32, 32)

    def product_us(count: int = 5000) -> float:
        begin = time.thread_time()
        for _ in range(count):
            x @ x
        return (time.thread_time() - begin) / count * 1e6

    product_us()
    bare = min(product_us() for _ in range(7))
    print(f"bare: {bare:.2f} µs a product")
    with tempfile.TemporaryDirectory() as folder:
        first = Capture(folder, 0, 1)  # the first start loads the profiler
        first.start()
        first.stop()
        for name, options in (
            ("times only", {"shapes": False, "memory": False}),
            ("shapes, memory (the default)", {}),
            ("and stacks", {"stacks": True}),
        ):
            capture = Capture(folder, 0, 1, **options)
            begin = time.process_time()
            capture.start()
            started = time.process_time() - begin
            cost = min(product_us() for _ in range(7)) - bare
            begin = time.process_time()
            path = capture.stop()
            ended = time.process_time() - begin
            size = path.stat().st_size if path else 0
            print(
                f"{name}: +{cost:.2f} µs a product, start {started * 1e3:.1f} ms, "
                f"end {ended:.2f} s for {size / 1e6:.0f} MB"
            )


def capture_overhead_of_training(rounds: int = 7, steps: int = 40) -> None:
    """Print how much longer training steps take captured, measured."""
    import torch

    from meshwise.runtime.capture import Capture

    torch.set_num_threads(1)
    for width in (64, 512):
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(256, width)

        def train(model=model, optimizer=optimizer, x=x) -> float:
            begin = time.process_time()
            for _ in range(steps):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.process_time() - begin) / steps

        train()
        bare, captured = [], []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(rounds):
                bare.append(train())
                capture = Capture(folder, 0, 1)
                capture.start()
                captured.append(train())
                capture.stop()
        bare_s, captured_s = sorted(bare)[rounds // 2], sorted(captured)[rounds // 2]
        print(
            f"training steps of width {width}: {bare_s * 1e3:.2f} ms bare, {captured_s * 1e3:.2f} ms "
            f"captured ({100 * (captured_s / bare_s - 1):+.0f} %)"
        )


def reading(megabytes: int) -> None:
    """Print time and memory of reading a trace of `megabytes`."""
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>" + "x" * 60
    event = {
        **{
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": 4335915688805.797,
            "dur": 12.345,
        },
        "args": {
            "External id": 1,
            "device": 0,
            "context": 1,
            "stream": 7,
            "correlation": 135071,
            "grid": [4, 1, 1],
        },
    }
    text = "  " + json.dumps(event)
    count = megabytes * 1_000_000 // (len(text) + 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json"
        with path.open("w") as file:
            file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": [\n')
            file.write(",\n".join([text] * count))
            file.write('\n], "traceName": "x"}\n')
        words = [sys.executable, "-c", _READ, str(path)]
        seconds, events, peak_gb = subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.split()
        size = path.stat().st_size / 1e6
    print(
        f"read {size:.0f} MB, {int(events):,} events: {float(seconds):.2f} s, {float(peak_gb):.2f} GB at most"
    )


def main() -> None:
    """All figures."""
    reading(270)
    capture_overhead()
    capture_overhead_of_training()


if __name__ == "__main__":
    main()
