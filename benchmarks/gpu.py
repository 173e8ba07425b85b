"""What one GPU really does, beside what is predicted for it: `python -m benchmarks gpu OUT [--device cpu]`.

Each part is a process of its own with a time limit, so that one that fails leaves the others; all of them
take nine minutes at most. OUT gets a file of each part, `machine.toml` (the constants that the kernels give,
which the predictions use) and `README.md`, a table with date, driver and versions. On CPUs all is small.
"""

import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("gpu_job.py")
LIMITS_S = {"kernels": 150, "fp4": 30, "decode": 40, "power": 40, "train": 130, "explain": 80, "serve": 60}
"""The parts in their order, and how long each may take; the rest stand on the kernels of the first."""
SIZES = {
    "cuda": [(1024, 8, 8, 2048), (2048, 12, 4, 2048), (4096, 4, 2, 4096)],  # hidden, layers, batch, tokens
    "cpu": [(64, 2, 2, 32)],
}


def main(words: list[str]) -> None:
    """Run every part, or as `--part` the one that is named."""
    out, device = Path(words[0]), words[words.index("--device") + 1] if "--device" in words else "cuda"
    if "--part" in words:
        part = words[words.index("--part") + 1]
        found = PARTS[part](out, device)
        (out / f"{part}.json").write_text(json.dumps(found, indent=1))
        return
    out.mkdir(parents=True, exist_ok=True)
    failed = {}
    for part, limit_s in LIMITS_S.items():
        command = [sys.executable, "-m", "benchmarks", "gpu", str(out), "--device", device, "--part", part]
        try:
            done = subprocess.run(command, timeout=limit_s, capture_output=True, text=True)
            if done.returncode:
                failed[part] = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        except subprocess.TimeoutExpired:
            failed[part] = f"took more than {limit_s} s"
        print(f"{part}: {failed.get(part, 'done')}", flush=True)
    (out / "README.md").write_text(table(out, device, failed))
    print(f"see {out / 'README.md'}")


def kernels(out: Path, device: str) -> Any:
    """Matmuls by dtype, attention forward and backward, memory, casts, launch: what `calibrate` measures."""
    from meshwise.runtime.calibrate import calibrate

    found = calibrate(device, ranks=1, quick=True)
    found.write(out / "machine.toml")
    return [
        {"what": f"{one.what} {one.shape} {one.dtype}", "measured": one.rate, "unit": one.unit}
        for one in found.samples
    ]


def fp4(out: Path, device: str) -> Any:
    """A matmul in NVFP4, where the GPU has it."""
    import torch

    from meshwise.runtime.calibrate import EFFORTS, fastest_s
    from meshwise.runtime.torch_private import scaled_mm

    if device == "cpu" or torch.cuda.get_device_capability() < (10, 0):
        return []
    side = 8192
    a, b = (
        torch.randint(0, 255, (side, side // 2), dtype=torch.uint8, device=device).view(
            torch.float4_e2m1fn_x2
        )
        for _ in range(2)
    )
    scale = torch.ones(side * side // 16, device=device).to(torch.float8_e4m3fn)
    effort = EFFORTS[device, True]
    seconds = fastest_s(
        lambda: scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16), device, effort
    )
    return [{"what": f"gemm {side}x{side}x{side} nvfp4", "measured": 2 * side**3 / seconds, "unit": "FLOP/s"}]


def decode(out: Path, device: str) -> Any:
    """Attention of one new token over a cache of keys and values, as bytes read."""
    import torch
    import torch.nn.functional as F

    from meshwise.runtime.calibrate import EFFORTS, fastest_s

    found = []
    for batch, tokens in ((1, 256),) if device == "cpu" else ((1, 8192), (32, 8192)):
        q = torch.randn(batch, 32, 1, 128, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 8, tokens, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
        seconds = fastest_s(
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            device,
            EFFORTS[device, True],
        )
        rate = 2 * k.numel() * 2 / seconds
        found.append({"what": f"decode attention {batch} x {tokens}", "measured": rate, "unit": "B/s"})
    return found


def power(out: Path, device: str) -> Any:
    """Watts that nvidia-smi tells, idle and under matmuls in bf16."""
    import torch

    if device == "cpu":
        return []
    query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "--id=0"]

    def watts() -> float:
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)

    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    idle_w, samples, ended = watts(), [], threading.Event()

    def sample() -> None:
        while not ended.wait(0.5):
            samples.append(watts())

    sampler = threading.Thread(target=sample)
    sampler.start()
    end_s = time.perf_counter() + 10
    while time.perf_counter() < end_s:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
    ended.set()
    sampler.join()
    found = {"idle": idle_w, "bf16 matmuls": statistics.median(samples)}
    return [{"what": f"power, {name}", "measured": value, "unit": "W"} for name, value in found.items()]


def train(out: Path, device: str) -> Any:
    """Steps of several sizes: seconds and the allocator's peak, beside estimate and dry run."""
    import meshwise as mw

    found = []
    for hidden, layers, batch, tokens in SIZES[device]:
        path = config(out, hidden, layers)
        plan = "zero=3,implementation=fsdp2"
        priced = mw.estimate(str(path), str(out / "machine.toml"), plan, batch=batch, seq=tokens)
        done = job("train", path, device, batch, tokens, 8)
        name = f"train {hidden} x {layers}, batch {batch} x {tokens}"
        step_s = statistics.median(done["step_s"][2:])
        found.append({"what": name, "measured": step_s, "predicted": priced.step_s, "unit": "s"})
        command = [sys.executable, *words_of("train", path, "cuda", batch, tokens, 3)]
        dry = mw.dry_run_script(command, ranks=1, device="h100-80g-sxm", stdout=sys.stderr)
        memory = priced.memory_bytes
        stated = memory["total"] - memory.get("overhead", 0.0)
        peaks = {"measured": done.get("peak_bytes"), "dry_run": dry.peak_bytes, "predicted": stated}
        found.append({"what": f"{name}, peak", "unit": "B", **peaks})
    return found


def explain(out: Path, device: str) -> Any:
    """A capture of training steps, and what `explain` says of it."""
    import meshwise as mw
    from meshwise.runtime.profile import profile_command

    hidden, layers, batch, tokens = SIZES[device][0]
    words = words_of("train", config(out, hidden, layers), device, batch, tokens, 4)
    folder = out / "traces"
    done = profile_command([sys.executable, *words], folder, stdout=sys.stderr)
    if done.exit_code != 0:
        raise RuntimeError(f"the job ended with exit code {done.exit_code}")
    said = mw.explain(
        folder, model=str(out / f"llama-{hidden}x{layers}.json"), cluster=str(out / "machine.toml"),
        plan="zero=3,implementation=fsdp2", batch=batch, seq=tokens,
    ).to_json()  # fmt: skip
    (out / "explained.json").write_text(json.dumps(said, indent=1))
    return [{"what": "the capture's step", "unit": "s", **said["step_s"]}]


def serve(out: Path, device: str) -> Any:
    """The passes of a small serving loop: one over the prompts, and one a token."""
    import meshwise as mw

    hidden, layers, _, tokens = SIZES[device][0]
    path = config(out, hidden, layers)
    done = job("serve", path, device, 1, tokens, 16)
    priced = mw.serve(str(path), str(out / "machine.toml"), "tp=1", prompt=tokens, output=16, token_s=1e3)
    rows = {"prompt": (done["prefill_s"], priced.first_token_s)}
    rows["token"] = (statistics.median(done["decode_s"]), None)
    return [
        {"what": f"serve 1 x {tokens}, {name}", "measured": measured, "predicted": predicted, "unit": "s"}
        for name, (measured, predicted) in rows.items()
    ]


PARTS: dict[str, Callable[[Path, str], Any]] = {
    "kernels": kernels, "fp4": fp4, "decode": decode, "power": power, "train": train, "explain": explain,
    "serve": serve,
}  # fmt: skip


def config(out: Path, hidden: int, layers: int) -> Path:
    """A Llama of this size, as a config.json."""
    heads = max(2, hidden // 128)
    sizes = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "vocab_size": min(32000, 32 * hidden),
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4),
        "intermediate_size": hidden * 7 // 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    path = out / f"llama-{hidden}x{layers}.json"
    path.write_text(json.dumps(sizes))
    return path


def words_of(work: str, path: Path, device: str, batch: int, tokens: int, steps: int) -> list[str]:
    """The words of the job, after Python's name."""
    return [str(JOB), work, str(path), device, str(batch), str(tokens), str(steps)]


def job(*words: Any) -> dict[str, Any]:
    """What the job prints."""
    command = [sys.executable, *words_of(*words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def table(out: Path, device: str, failed: dict[str, str]) -> str:
    """All parts as one page."""
    import torch

    driver, name = "none", platform.processor() or platform.machine()
    if device == "cuda" and torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        name = torch.cuda.get_device_name(0)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    lines = [f"# {name}", "", f"{time.strftime('%Y-%m-%d')}, driver {driver}, {versions}", ""]
    lines += ["| what | measured | predicted | dry run | unit |", "| --- | --- | --- | --- | --- |"]
    for part in LIMITS_S:
        path = out / f"{part}.json"
        for row in json.loads(path.read_text()) if path.exists() else []:
            values = (row.get(column) for column in ("measured", "predicted", "dry_run"))
            cells = ["" if value is None else f"{value:.4g}" for value in values]
            lines.append(f"| {row['what']} | {' | '.join(cells)} | {row['unit']} |")
    lines += ["", *(f"- {part} failed: {reason}" for part, reason in failed.items())]
    if (out / "machine.toml").exists():
        lines += ["", "The constants that the kernels give:", "", "```toml"]
        lines += [(out / "machine.toml").read_text().strip(), "```"]
    return "\n".join(lines) + "\n"
