"""A user's script that uses the whole library; `mypy --strict` passes on it (see test_public)."""

from pathlib import Path
from typing import assert_type

import meshwise as mw


def main(folder: Path) -> None:
    priced = mw.estimate("llama3-8b", "h100-80g-sxm:64", "tp=2,zero=3", batch=128, seq=8192)
    assert_type(priced, mw.Estimate)
    assert_type(priced.step_s, float)
    assert_type(priced.ledger, mw.Ledger)
    model, cluster = mw.find_model("llama3-8b"), mw.find_cluster("h100-80g-sxm:64")
    assert_type((model, cluster), tuple[mw.Model, mw.Cluster])
    plan = mw.Plan(tp=2, zero=3)
    assert mw.parse_plan(mw.plan_text(plan)) == plan
    same = mw.estimate(model, cluster, plan, batch=128, seq=8192)
    assert same.step_s == priced.step_s
    assert mw.Workload(batch=128, seq=8192) == same.workload

    found = mw.search(model, "h100-80g-sxm:8", "dtype=bf16", batch=8, seq=8192, top=1)
    best = found.best[0]
    again = mw.estimate(model, "h100-80g-sxm:8", mw.plan_text(best.plan), batch=8, seq=8192,
                        microbatch=best.workload.microbatch)  # fmt: skip
    assert again.step_s == best.step_s
    with mw.on_ray(None):  # here; "auto" is the cluster that this machine is part of
        scaling = mw.study(model, cluster, "gpus=8|16", batch=16, seq=8192)
    assert scaling.to_json(mw.budget(tokens=1e9))["points"][0]["days"] > 0
    assert scaling.front("num_chips") and scaling.points[1].cluster.num_chips == 16
    card = mw.fit_card("4090", models=["llama3-8b"], methods=["qlora"], tokens=1e7, price=0.35)
    assert card.runs[0].fits and card.to_polars()["cost"][0] < 1.0
    served = mw.serve(model, "h100-80g-sxm:2", "tp=2", prompt=1024, output=128, token_s=0.02)
    sized = mw.serve(model, "h100-80g-sxm:4", rate=2.0, token_s=0.05, ttft_s=1.0, price=2.5)
    assert sized.sizing is not None and sized.sizing.best is not None and sized.cost
    assert served.first_token_s > 0 and served.max_sequences > 0
    served.to_html(folder / "server.html")
    rollout = mw.rl("llama3-8b", "h100-80g-sxm:8", prompts=8, samples=8, output=256, mode="colocated",
                    train_plan="pp=2", rollout_plan="tp=1")  # fmt: skip
    assert rollout.step.fits and sum(rollout.step.phases_s.values()) == rollout.step.step_s
    job = mw.launch(model, cluster, plan, to="megatron-lm", batch=128, seq=8192)
    job.write(folder)
    assert mw.read_job(folder / "megatron_args.txt", cluster).plan == mw.Plan(tp=2, zero=3)
    times, _ = mw.collective("all_reduce", cluster, [2.0**30], ranks=8)
    assert times[0].bus_bytes_per_s < times[0].ceiling_bytes_per_s * 1.1
    tables = mw.reproduce("nersc-2024-02", "gpt3-175b", "nersc-notebook", "tp=4,sp=1")
    (folder / "tables.csv").write_text(tables.to_csv())
    try:
        mw.estimate("llama3-8b", "h100-80g-sxm:8", mw.Plan(tp=3), batch=8)
    except mw.MeshwiseError as error:
        print(error)


def what_takes_longer(folder: Path) -> None:
    outcome = mw.dry_run("ulysses", ranks=4, seq=256, device="cpu")
    command = ["python", "-c", "import torch; torch.ones(8, device='cuda') + 1"]
    script = mw.dry_run_script(command, ranks=4)
    print(script.peak_bytes, script.collectives(), script.guesses)
    priced = mw.estimate("llama3-8b", "h100-80g-sxm:8", batch=8, seq=4096)
    assert not mw.compare_script(command, priced)[0].agree
    assert_type(outcome.peak_bytes, float)
    assert mw.compare("ulysses", ranks=2, with_run=False, seq=256).agree
    ran = mw.run("ulysses", ranks=2, seq=256)
    assert ran is not None and ran.peak_bytes > 0
    profiled = mw.profile(["torchrun", "--nproc-per-node=2", "train.py"], folder)
    assert_type(profiled.exit_code, int)
    print(mw.explain(folder, model="llama3-8b", cluster="h100-80g-sxm:2", batch=2, seq=2048))
    limits = mw.frontier("h100-80g-sxm", months=3, utilization=0.7, schedule="interleaved").ideal
    print(limits)
    validation = mw.validate([folder / "runs.csv"])
    print(validation.to_json())


if __name__ == "__main__":
    main(Path())
