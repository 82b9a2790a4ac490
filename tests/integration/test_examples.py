"""The examples and benchmarks run."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from forked import run_script, torchrun

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str, **how: Any) -> str:
    """What an example or a benchmark prints."""
    done = run_script(ROOT / script, *options, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_examples_write_is_in_outputs() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        source = path.read_text()
        assert "Path(__file__).with" not in source, path.name
        found = re.findall(r'\bPath\("([^")]+)"\)', source)
        assert all(x.split("/")[0] == "outputs" for x in found), path.name


def test_train_gpt(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    options = ["--quick", "--no-compile", "--compute", "float32", "bfloat16"]
    out = run("examples/train_gpt.py", *options, "--out", str(picture))
    for name in ("", " + Kahan", " stochastic", " compact"):
        for compute in ("float32", "bfloat16"):
            assert f"bfloat16{name} (computes in {compute})" in out
            assert re.search(rf"^bfloat16{re.escape(name)} +{compute} ", out, re.M)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_gpt_with_several_seeds(tmp_path: Path) -> None:
    """Each row is the mean of runs with different seeds; distances compare equal seeds."""
    rows = ["--rows", "float32", "bfloat16 + Kahan"]
    options = ["--quick", "--no-compile", *rows, "--out", str(tmp_path / "curves.png")]
    out = run("examples/train_gpt.py", *options, "--seeds", "3", "--seed", "7")
    assert re.findall(r"^seed (\d), \d of 3$", out, re.M) == ["7", "8", "9"]
    ends = re.findall(r"step +12  validation (\S+) (\S+)$", out, re.M)
    wide, kahan = ([float(x) for x in row] for row in zip(*ends))
    assert len(set(wide)) == 3
    number = r"[+-]?\d\.\d{4}"
    found = re.search(
        rf"^bfloat16 \+ Kahan .* ({number}) ± ({number}) +({number}) ± ({number}) ",
        out,
        re.M,
    )
    assert found is not None
    apart = [x - y for x, y in zip(kahan, wide)]
    expected = [mean(kahan), stdev(kahan) / 3**0.5, mean(apart), stdev(apart) / 3**0.5]
    assert [float(x) for x in found.groups()] == pytest.approx(expected, abs=1.1e-4)


@pytest.mark.full
def test_own_rule() -> None:
    out = run("examples/own_rule.py", "--quick")
    for rule in ("SignSGD", "AdaBelief", "Orthogonal"):
        assert f"{rule}, validation loss after 10 steps" in out
    found = re.findall(r"moves differ by (.*)\)", out)
    assert len(found) == 3 and max(map(float, found)) < 1e-5
    assert len(re.findall(r"(?:momentum|eps): (?:\d\.\d+(?:, )?){4}\n", out)) == 3


@pytest.mark.full
def test_memory_timeline(tmp_path: Path) -> None:
    picture, numbers = tmp_path / "timeline.png", tmp_path / "numbers.json"
    options = ["--quick", "--no-compile", "--out", str(picture), "--json", str(numbers)]
    # The sums of the categories are checked by the example itself.
    out = run("examples/memory_timeline.py", *options)
    runs = json.loads(numbers.read_text())["peak bytes"]
    ways = ["standard", "recipe", "release", "release, bfloat16", "release, compact"]
    assert list(runs) == ways
    for name in runs:
        assert name in out
    assert picture.read_bytes().startswith(b"\x89PNG")

    full = runs["standard"]["parameters"]
    compact = runs["release, compact"]
    # For 2 bytes 3.1 in codes, of moments and compensation; small tensors have 7.
    assert 1.5 < compact["optimizer state"] / compact["parameters"] < 1.8
    assert compact["parameters"] == full / 2
    for name, peaks in runs.items():
        if name == "release, compact":
            continue
        low = peaks["parameters"] < full
        # Two moments, and for bfloat16 the compensation; the step counts are few bytes.
        state = peaks["optimizer state"] / peaks["parameters"]
        assert (3 if low else 2) < state < (3.01 if low else 2.01)
        assert peaks["parameters"] == (full / 2 if low else full)
    assert runs["standard"]["gradients"] >= full
    for name in ways[1:]:
        assert runs[name]["gradients"] < 0.3 * runs[name]["parameters"]


@pytest.mark.full
def test_plan_llama() -> None:
    out = run("examples/plan_llama.py", "--quick", "--models", "8B")
    assert "Llama, 1.49 billion parameters, AdamW on cuda; budget 80.00 GB" in out
    assert "AdamW on cuda, each of 8 ranks; budget 80.00 GB" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("8B ")]
    assert [row[1:3] for row in rows] == [["24", "GB"], ["80", "GB"], ["8", "x"]]


@pytest.mark.night
def test_plan_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--quick", "--no-compile", "--json", str(numbers)]
    out = run("benchmarks/plan.py", *options)
    found = json.loads(numbers.read_text())["plans"]
    assert list(found) == ["ViT-L/16", "GPT-2"]
    for model, recipes in found.items():
        assert list(recipes) == ["float32, release", "bfloat16 compact"]
        for recipe, cell in recipes.items():
            assert any(model in row and recipe in row for row in out.splitlines())
            # Of a small model the temporaries within kernels are a larger share.
            assert abs(cell["ratio"] - 1) < 0.02
    assert numbers.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_muon_gpt(tmp_path: Path) -> None:
    picture, numbers = tmp_path / "muon.png", tmp_path / "muon.json"
    options = ["--quick", "--no-compile", "--seeds", "2", "--evaluations", "1"]
    options += ["--out", str(picture), "--json", str(numbers)]
    out = run("examples/muon_gpt.py", *options, strict=False)
    kept = json.loads(numbers.read_text())
    for name in ("AdamW", "Muon + AdamW"):
        assert re.search(rf"^{re.escape(name)} +\d\.\d{{4}} +\d\.\d{{4}}", out, re.M)
        assert len(kept[name]["sweep"]) == len(kept[name]["seeds"]) == 2
    assert "Muon has 4 matrices" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_mixed_optimizers(tmp_path: Path) -> None:
    picture = tmp_path / "mixed.png"
    options = ["--quick", "--out", str(picture)]
    out = run("examples/mixed_optimizers.py", *options)
    rows = [line.split() for line in out.splitlines() if line.endswith("%")]
    assert [row[0] for row in rows] == ["AdamW", "Lion"]
    # Two optimizers, and in each run the average apart from the weights.
    assert len({number for row in rows for number in row[-3:-1]}) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.night
def test_release_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--quick", "--no-compile", "--json", str(numbers)]
    out = run("benchmarks/release.py", *options)
    written = json.loads(numbers.read_text())
    for way in ("standard", "recipe", "recipe, fused", "torch hooks, fused", "release"):
        assert way in out
        assert written["peak"][way]["bytes"] > 0
        assert written["time"]["batch 4"][way]["ratio"] > 0


@pytest.mark.night
def test_train_step_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--quick", "--models", "MLP", "--compilations", "0", "--json", str(numbers)]
    out = run("benchmarks/train_step.py", *options, strict=False)
    rows = json.loads(numbers.read_text())["models"]["MLP"]
    for way in ("eager + fused", "compile(model) + fused", "release by hooks"):
        assert f"| {way} " in out
        assert rows[way]["peak"] > 0 < rows[way]["milliseconds"]
    assert {"one graph", "one graph, pure"} < set(rows)


@pytest.mark.night
def test_accumulation_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--quick", "--json", str(numbers)]
    out = run("benchmarks/accumulation.py", *options)
    cells = json.loads(numbers.read_text())["cells"]
    rules = ["SGD", "SGD, momentum", "SGD, Nesterov", "Adam", "AdamW", "StableAdamW"]
    for rule in [*rules, "RAdam", "Ranger", "Adan", "Lion"]:
        assert f"| {rule} " in out
        assert list(cells[rule]) == ["flag", "states", "buffer", "bfloat16 buffer"]
        refused = rule in ("SGD", "Adan")
        assert (cells[rule]["states"]["refusal"] is not None) == refused
        assert refused or cells[rule]["states"]["moment"] < 1e-6
        assert cells[rule]["buffer"]["error"] == 0
    for policy in ("flag", "states", "buffer", "bfloat16 buffer"):
        assert f" {policy} |" in out
    extra = {policy: cell["extra"] for policy, cell in cells["AdamW"].items()}
    assert extra == {"flag": 0, "states": 0, "buffer": 4, "bfloat16 buffer": 2}


@pytest.mark.night
def test_replicas_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--quick", "--no-compile", "--json", str(numbers)]
    out = run("benchmarks/replicas.py", *options)
    found = json.loads(numbers.read_text())
    memory = {way: cell["peak"] for way, cell in found["memory"].items()}
    for way in memory:
        assert f"| {way} " in out
    # How many gradients of ours wait for the other process depends on when it has a core:
    # test_replicas.py bounds the messages that are under way.
    assert memory["release on replicas"] > 0 and memory["DDP, step()"] > 0.85
    assert found["time"]["release on replicas"]["ratio"] > 0


@pytest.mark.night
def test_which_benchmark(tmp_path: Path) -> None:
    numbers, rows = tmp_path / "numbers.json", tmp_path / "rows.jsonl"
    options = ["--quick", "--tasks", "images", "table", "--json", str(numbers)]
    options += ["--optimizers", "AdamW", "ScheduleFreeSGD", "--rows", str(rows)]
    options += ["--rule", f"{ROOT / 'examples/rules/laprop.py'}:LaProp"]
    command = [sys.executable, str(ROOT / "benchmarks/which.py"), *options]
    # Not by `run`, whose processes may have no children.
    out = subprocess.check_output(command, text=True)
    found = json.loads(numbers.read_text())["tasks"]
    assert list(found) == ["images", "table"]
    for task in found.values():
        cell = task["optimizers"]["ScheduleFreeSGD"]
        assert str(cell["lr"]) in cell["by lr"] and len(cell["final"]) == 2
        assert cell["bytes"] == pytest.approx(8.0, abs=0.2)
        assert len(cell["untuned"]["final"]) == 2
        own = task["optimizers"]["LaProp"]
        assert own["bytes"] > 11.0 and own["final"] != cell["final"]
    assert "images: " in out and "as a population: " in out
    kept = rows.read_text()
    # What is in the file is not trained again.
    again = subprocess.check_output(command, text=True)
    assert again.splitlines()[2] == out.splitlines()[2]
    assert rows.read_text() == kept
    # What earlier results lack is added to them, and nothing else is trained.
    wider, more = tmp_path / "wider.json", ["--optimizers", "AdamW", "Lion"]
    more += ["--rule", "", "--rows", str(tmp_path / "added.jsonl")]
    more += ["--into", str(numbers), "--json", str(wider)]
    subprocess.check_output(command + more)
    before, added = (json.loads(file.read_text()) for file in (numbers, wider))
    assert list(added["added"]) == ["Lion"]
    for name, task in added["tasks"].items():
        lion = task["optimizers"].pop("Lion")
        assert lion["bytes"] == pytest.approx(8.0, abs=0.2) and lion["beside"]["step"] > 0
        assert task["optimizers"] == before["tasks"][name]["optimizers"]
    # A rule of matrices, at half of Adam's state; AdamW has the rest.
    file = ROOT / "examples/rules/adam_mini.py"
    matrices = ["--tasks", "table", "--rule", f"{file}:AdamMini"]
    subprocess.check_output(command + matrices)
    task = json.loads(numbers.read_text())["tasks"]["table"]
    assert 8.0 < task["optimizers"]["AdamMini"]["bytes"] < 11.0


def test_the_search_ends_where_no_learning_rate_trains() -> None:
    code = """
import which
config = which.Config(tasks=("language",), optimizers=("Shampoo",))
tasks, contenders = which.named(config)
task, shampoo, rows = tasks["language"], contenders["Shampoo"], {}
while jobs := which.needed(task, shampoo, rows, config):
    for job in jobs:
        for lr, seed in job.members:
            row = {"losses": [which.DIVERGED], "seconds": 0.0}
            rows[which.Key(task.name, "Shampoo", lr, seed)] = row
assert which.summary(task, shampoo, rows, config)["final"] == [which.DIVERGED] * 3
print(len(rows))
"""
    folder = ROOT / "benchmarks"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)
    assert int(out) == 5 + 2  # the grid, and two more seeds at one of its lrs


@pytest.mark.night
def test_step_benchmark(tmp_path: Path) -> None:
    options = ["--sets", "tiny", "--ways", "optimi_func", "compile=False"]
    options += ["--seconds", "0.05", "--no-compile", "--json", str(tmp_path / "old.json")]
    out = run("benchmarks/step_time.py", *options)
    found = json.loads((tmp_path / "old.json").read_text())
    assert {"name", "threads", "torch", "date", "commit"} <= set(found["machine"])
    for dtype in ("float32", "bfloat16", "bfloat16 + Kahan"):
        assert f"| 5 tensors, {dtype} " in out
        cell = found["steps"]["tiny"][dtype]
        assert cell["torch fused"]["ratio"] == 1
        for way in ("optimi_func", "compile=False"):
            assert f" {way} |" in out
            assert 0 < cell[way]["low"] <= cell[way]["ratio"] <= cell[way]["high"]
    assert (tmp_path / "old.png").read_bytes().startswith(b"\x89PNG")

    # A run that took twice as long for everything.
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for cell in found["steps"]["tiny"].values():
        for ratio in cell.values():
            ratio["ratio"] *= 2
    new.write_text(json.dumps(found))
    out = run("benchmarks/step_time.py", "--compare", str(old), str(new))
    row = next(x for x in out.splitlines() if "float32, optimi_func " in x)
    assert row.endswith(" 2.00 |")
    assert "torch fused" not in out


@pytest.mark.night
def test_small_step_benchmarks(tmp_path: Path) -> None:
    """The other questions about a step, those that need no compiler."""
    ran = {
        "host_cost": [],
        "peers": ["--rules", "AdamW"],
        "turns": [],
        "rules_per_byte": [],
        "torch_classes": [],
        "storage": [],
        "soap": [],
        "gpu": ["--device", "cpu", "--sets", "tiny"],
    }
    found: dict[str, dict[str, Any]] = {}
    for name, more in ran.items():
        script = f"benchmarks/{name}.py"
        path = tmp_path / f"{name}.json"
        options = ["--quick", "--no-compile", "--json", str(path), *more]
        out = run(script, *options)
        found[name] = json.loads(path.read_text())
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        # What was written says the same.
        options = ["--show", str(path), "--json", str(tmp_path / "again.json")]
        assert run(script, *options) == out
    assert 5.12 < found["storage"]["bytes"]["compact"]["kept"] < 5.15
    assert len(found["turns"]["turns"]) == 8
    assert [*found["peers"]["peers"]] == ["AdamW, torch, ViT-tiny"]
    assert found["soap"]["soap"]["64 x 64"]["SOAP, mean of ten"]["ratio"] > 0
    cell = found["gpu"]["gpu"]["tiny"]["float32"]
    assert cell["share of a copy"]["ratio"] > 0 and cell["host seconds"]["torch fused"] > 0
    cell = found["host_cost"]["host cost"]["AdamW"]["4"]
    assert list(cell) == ["torch fused", "torch foreach", "torch for-loop"]


@pytest.mark.night
@pytest.mark.parametrize(("name", "key"), [("cold_start", "first"), ("lbfgs", "fits")])
def test_benchmarks_that_start_processes_or_solve(
    name: str, key: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.json"
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--quick"]
    # Not by `run`, whose processes may have no children.
    out = subprocess.check_output([*command, "--json", str(path)], text=True)
    said = {"first": "optimi_func", "fits": "solve, in_dims"}[key]
    assert said in out and json.loads(path.read_text())[key]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_is_not_asked_where_there_is_none() -> None:
    done = run_script(ROOT / "benchmarks/gpu.py", "--quick")
    assert done.returncode != 0
    assert "needs a CUDA device" in done.stderr and not done.stdout


@pytest.mark.full
def test_lr_sweep(tmp_path: Path) -> None:
    pictures = [tmp_path / "sweep.png", tmp_path / "pbt.png"]
    options = ["--quick", "--no-compile", "--pbt", "--out", str(pictures[0])]
    options += ["--pbt-out", str(pictures[1])]
    out = run("examples/lr_sweep.py", *options)
    for name in ("sweep", "pbt"):
        assert f"{name}: best of 9" in out
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_hypergradient_examples(tmp_path: Path) -> None:
    examples = {
        "learned_lr": [],
        "maml_sinusoid": ["--no-compile"],
    }
    lines = {"learned_lr": "learned rates:", "maml_sinusoid": "joint pretraining: mean"}
    for name, more in examples.items():
        script = f"examples/{name}.py"
        picture = tmp_path / f"{name}.png"
        options = ["--quick", *more, "--out", str(picture)]
        out = run(script, *options)
        assert lines[name] in out
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.night
def test_population_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--quick", "--no-compile", "--json", str(numbers)]
    out = run("benchmarks/population.py", *options)
    cells = json.loads(numbers.read_text())["cells"]["3"]
    assert list(cells) == ["loop", "vmap", "population"]
    for way, cell in cells.items():
        assert f"| {way} " in out
        assert 0 < cell["low"] <= cell["ratio"] <= cell["high"]
        assert cell["error"] < 1e-5


@pytest.mark.full
def test_sharded_prints_what_its_page_says() -> None:
    """The first program of the page on many processes, here on the CPU."""
    page = (ROOT / "docs/distributed.md").read_text()
    (said,) = re.findall(r"```text\n(step   0: .*?)```", page, re.S)
    out = run("examples/sharded.py", count=2, strict=False)
    assert OutputChecker().check_output(said, out, ELLIPSIS)


@pytest.mark.parametrize("rule", [[], ["--muon"]], ids=["adamw", "muon"])
@pytest.mark.full
def test_fsdp2(tmp_path: Path, rule: list[str]) -> None:
    """Two processes save; one goes on, with gradient release, and ends as the two did."""
    losses: list[str] = []
    for count, more in ((2, rule), (1, ["--release", *rule])):
        options = ["--quick", "--no-compile", "--steps", "4", "--every", "2", *more]
        options += ["--folder", str(tmp_path / "kept")]
        out = run("examples/fsdp2.py", *options, count=count, strict=False)
        last = out.splitlines()[-1]
        begin = 0 if count == 2 else 2
        assert last.startswith(f"{count} processes: steps {begin} to 4, loss "), last
        losses.append(last.split()[-1])
        # As if it had been stopped while it wrote its last.
        (tmp_path / "kept" / "step 4" / ".metadata").unlink()
    assert abs(float(losses[0]) - float(losses[1])) <= 2e-6


@pytest.mark.full
def test_sac() -> None:
    out = run("examples/sac.py", "--no-compile", "--steps=200", "--reset=50")
    assert re.fullmatch(r"returns: -\d+\n", out)


@pytest.mark.night
def test_sac_learns() -> None:
    out = run("examples/sac.py", "--no-compile", "--seed=1")
    returns = list(map(float, out.split()[1:]))
    assert sum(returns[:5]) / 5 < -1000 and sum(returns[-5:]) / 5 > -500


def pretrain(folder: Path, count: int, *options: str) -> tuple[int, int, list[float]]:
    """Return the first and the last step of a run, and its two losses."""
    own = ["--no-compile", "--length=6", "--every=2", f"--folder={folder}", *options]
    out = run("examples/pretrain.py", *own, count=count, strict=False).splitlines()[-1]
    found = re.fullmatch(rf"{count} processes: steps (\d) to (\d), loss (.*), .* (.*)", out)
    assert found is not None, out
    return int(found[1]), int(found[2]), [float(found[3]), float(found[4])]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_pretrain(tmp_path: Path) -> None:
    """Two processes, then three, then one go on as two do, with shares of other tokens."""
    one, other = tmp_path / "one", tmp_path / "other"
    ends = pretrain(one, 2, "--float32", "--steps=6", "--keep=3")
    assert sorted(x.name for x in one.glob("step *")) == [
        f"step 0000000{i}" for i in (2, 4, 6)
    ]
    # Of a step that was saved while the next ones were taken.
    shutil.copytree(one, other)
    (other / "latest").write_text("step 00000002")
    more = pretrain(other, 3, "--float32", "--steps=4", "--keep=1")
    assert more[:2] == (2, 4)
    # What is later than the latest is of a run that was given up, and stays.
    assert sorted(x.name[-1] for x in other.glob("step *")) == ["4", "6"]
    more = pretrain(other, 1, "--float32", "--steps=6", "--keep=1")
    assert more == (4, 6, pytest.approx(ends[2], abs=1e-5))
    assert [x.name[-1] for x in other.glob("step *")] == ["6"]
    assert (other / "latest").read_text() == "step 00000006"
    rows = logged(other)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]
    for row, again in zip(rows[2:6], rows[6:]):
        assert again["norm before clip"] == pytest.approx(row["norm before clip"], rel=1e-3)
        assert again["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert row["norm before clip"] > 0 == row["skipped steps"]
    # In bfloat16, with blocks that are compiled, losses are alike.
    low = pretrain(tmp_path / "low", 1, "--steps=2", "--compile-blocks")
    assert low[2][0] == pytest.approx(rows[1]["loss"], rel=1e-3)
    assert f"{rows[1]['loss']:.6f}" != f"{low[2][0]:.6f}"


@pytest.mark.full
def test_pretrain_stops_all_processes_if_one_is_asked_to(tmp_path: Path) -> None:
    """Each saves the step that all have taken, and the run goes on from there."""
    command = [sys.executable, str(ROOT / "examples/pretrain.py"), "--no-compile"]
    command += ["--float32", "--steps=1000", f"--folder={tmp_path}"]
    running = [subprocess.Popen(command, env=os.environ | x) for x in torchrun(2)]
    while not (tmp_path / "log.jsonl").exists():
        assert {x.poll() for x in running} == {None}
        time.sleep(0.1)
    running[1].terminate()
    assert [x.wait(120) for x in running] == [0, 0]
    last = logged(tmp_path)[-1]["step"]
    assert (tmp_path / "latest").read_text() == f"step {last:08}" and last < 50
    out = run(
        "examples/pretrain.py", *command[2:4], f"--steps={last + 1}", command[-1], count=1
    )
    assert f"steps {last} to {last + 1}," in out


@pytest.mark.full
def test_pretrain_refuses_what_it_cannot_share(tmp_path: Path) -> None:
    options = ["--batch=2", f"--folder={tmp_path / 'none'}"]
    done = run_script(ROOT / "examples/pretrain.py", *options, count=3)
    assert done.returncode == 2 and "--batch 2: allowed are as many as" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_ddp(tmp_path: Path) -> None:
    """With and without release the losses are the same, and each resumes the other."""
    script, options = "examples/ddp.py", ["--no-compile", "--every=3"]
    lasts: list[str] = []
    for name, steps, more in (
        ("straight", 6, []),
        ("released", 6, ["--release"]),
        ("mixed", 3, []),
        ("mixed", 6, ["--release"]),
    ):
        how = [f"--steps={steps}", f"--file={tmp_path / name}.pt", *more]
        out = run(script, *options, *how, count=2, strict=False)
        lasts.append(out.splitlines()[-1])
    assert lasts[0].startswith("2 processes: steps 0 to 6, loss ")
    assert lasts[1] == lasts[0]
    assert lasts[3] == lasts[0].replace("steps 0", "steps 3")


@pytest.mark.full
def test_fsdp2_says_what_does_not_fit(tmp_path: Path) -> None:
    script = "examples/fsdp2.py"
    options = ["--quick", "--no-compile", "--steps=1", "--every=1", f"--folder={tmp_path}"]
    run(script, *options, count=1, strict=False)
    done = run_script(ROOT / script, *options, "--muon", count=1, strict=False)
    assert done.returncode != 0
    assert re.search(
        r"step 1 does not fit this run: .*momentum_buffer.*--folder", done.stderr
    )


@pytest.mark.full
def test_resume(tmp_path: Path) -> None:
    """What becomes of it when it is killed is in test_killed.py."""
    checkpoint = tmp_path / "run.pt"
    options = ["--no-compile", "--epochs=50", "--every=100"]
    out = run("examples/resume.py", *options, f"--checkpoint={checkpoint}")
    (right,) = re.findall(r"begun\n800 steps: (\S+)% of the points", out)
    assert float(right) > 90
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.full
def test_safetensors_state(tmp_path: Path) -> None:
    out = run("examples/safetensors_state.py", f"--out={tmp_path}")
    assert re.search(r"2\.weight\.kahan_comp +bfloat16 +\[1, 32\]", out)
    assert out.endswith("the same weights as 20 steps: True\n")


@pytest.mark.full
def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = run(
        "examples/trainers/transformers_trainer.py", f"--out={tmp_path}", strict=False
    )
    assert "20 resumed for the rest: the same weights: True" in out
    (losses,) = re.findall(r"loss every 10 steps: (.*)", out)
    losses = list(map(float, losses.split(", ")))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2


@pytest.mark.full
def test_transformers_callbacks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = "examples/trainers/transformers_callbacks.py"
    out = run(script, f"--out={tmp_path}", strict=False)
    assert "Release: the same weights: True" in out
    found = re.findall(r"^(.*): the saved weights are the average: (\w+)$", out, re.M)
    assert found == [("no callback", "False"), ("SaveAverage", "True")]


@pytest.mark.full
def test_lightning_schedule_free(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = "examples/trainers/lightning_schedule_free.py"
    out = run(script, f"--out={tmp_path}", strict=False)
    assert "the last checkpoint is the average: True" in out
    assert "the average is the trained weights: False" in out
    assert "resumed half way, the same end: True" in out


@pytest.mark.full
def test_lightning_fit(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    out = run("examples/trainers/lightning_fit.py", f"--out={tmp_path}", strict=False)
    found = re.findall(r"(\w+) +loss .*, the weights of the automatic run: True", out)
    assert found == ["automatic", "manual", "resumed"]


@pytest.mark.full
def test_accelerate_loop(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = run("examples/trainers/accelerate_loop.py", f"--out={tmp_path}", strict=False)
    (apart,) = re.findall(r"4 parts a step or one batch: weights differ by (\S+)", out)
    assert float(apart) < 1e-5


@pytest.mark.full
def test_grad_scaler() -> None:
    out = run("examples/trainers/grad_scaler.py")
    rows = re.findall(r"^(\S.*\S) +(\d+) of 200 steps taken, loss (\S+)$", out, re.M)
    taken = {name: int(steps) for name, steps, _ in rows}
    loss = {name: float(x) for name, _, x in rows}
    assert taken["float32"] == taken["float16"] == 200
    assert 150 < taken["float16, scaled"] < 200
    assert loss["float16, scaled"] < 2 * loss["float32"] < loss["float16"] / 10


@pytest.mark.full
def test_averaged_model() -> None:
    out = run("examples/trainers/averaged_model.py")
    last, swa, ema = map(float, re.findall(r"loss without the noise (\S+)", out))
    assert max(swa, ema) < last / 2


@pytest.mark.full
def test_optimizer_in_backward(tmp_path: Path) -> None:
    out = run("examples/trainers/optimizer_in_backward.py", f"--out={tmp_path / 'run.pt'}")
    assert "gradients freed: True" in out
    assert "within a cycle: the same weights: True" in out


@pytest.mark.full
def test_finetune(tmp_path: Path) -> None:
    picture = tmp_path / "finetune.png"
    out = run("examples/finetune.py", "--quick", f"--out={picture}")
    rows = re.findall(r"^(1e-0\d) +(\w+) +(\S+) .*?( \(the same bits\))?$", out, re.M)
    ways = ["float32", "bfloat16", "kahan", "kahan8", "compact", "exact"]
    for lr in ("1e-05", "1e-06"):
        apart = {name: float(x) for at, name, x, _ in rows if at == lr}
        assert list(apart) == ways
        assert apart["exact"] == 0 < apart["kahan"] < 0.1 < 0.9 < apart["bfloat16"]
    same = [name for _, name, _, bits in rows if bits]
    assert same == ["float32", "exact"] * 2
    assert picture.read_bytes().startswith(b"\x89PNG")
