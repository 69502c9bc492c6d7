"""Training on GPUs: `make test-gpu` runs these tests on them. Elsewhere their bodies run on the CPU.

Workers of a machine with one GPU share it, through gloo and the memory of the host, or, with the device `nccl`,
through NCCL; with a GPU each they use NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.gpu_runs import peaks, train

CPU, FAR = pytest.param("cpu"), pytest.param("far")
CPU_LONG, FAR_LONG = (pytest.param(one, marks=pytest.mark.long) for one in ("cpu", "far"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CUDAS = pytest.param("cuda", marks=pytest.mark.gpu(count=2))
RECIPES = [
    "allreduce",
    "local_sgd(every=4)",
    "diloco(every=4)",
    "allreduce(how=error_feedback(top_k(0.1)))",
    "allreduce(how=error_feedback(sign()))",
    "power_sgd(rank=2)",
    "async_sgd",
]
SHORT = "allreduce(how=error_feedback(top_k(0.1)))"
NCCL = pytest.param("nccl", marks=pytest.mark.gpu)


def recipes() -> list[object]:
    """Return each recipe on a GPU, and on the CPU: one in the ordinary suite, and all in the long one."""
    on_cpu = [pytest.param(one, "cpu", marks=() if one == SHORT else pytest.mark.long) for one in RECIPES]
    return on_cpu + [pytest.param(one, device, marks=pytest.mark.gpu) for one in RECIPES for device in ("cuda", "nccl")]


@pytest.mark.parametrize(("recipe", "device"), recipes())
def test_a_recipe_trains_on_the_device(recipe: str, device: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", device, recipe)
    run.check(device, is_synchronous="async" not in recipe)


@pytest.mark.parametrize("device", [CPU_LONG, CUDA])
def test_a_run_is_resumed_from_a_checkpoint_on_the_device(device: str, tmp_path: Path) -> None:
    saved = ["--checkpoint-every", "1 rounds"]
    first = train(tmp_path / "one", device, "allreduce", *saved, script=("--epochs", "2"))
    first.check(device)
    again = train(tmp_path / "two", device, "allreduce", "--resume", str(tmp_path / "one"), script=("--epochs", "4"))
    again.check(device)
    whole = train(tmp_path / "whole", device, "allreduce", script=("--epochs", "4"))
    assert again.states == whole.states


@pytest.mark.parametrize("device", [FAR, CPU_LONG, NCCL, CUDAS])
def test_a_killed_worker_leaves_its_group_and_joins_the_next(device: str, tmp_path: Path) -> None:
    """With a group of the devices in each generation: NCCL on GPUs, and on the device of the tests its own."""
    workers = min(torch.cuda.device_count(), 3) if device == "cuda" else 3
    options, script = ("--failure-timeout", "4s"), ("--epochs", "6", "--kill", "1")
    run = train(tmp_path / "run", device, "allreduce", *options, script=script, workers=workers)
    run.check(device)
    assert run.failures == 1
    assert "pass through the memory" not in run.output


@pytest.mark.parametrize("device", [FAR_LONG, CPU_LONG, CUDA])
def test_large_tensors_between_stages_on_the_device_equal_a_single_process(device: str, tmp_path: Path) -> None:
    """They pass through memory that the processes share."""
    wide = ("--width", "16384")
    whole = train(tmp_path / "whole", device, "allreduce", script=wide, workers=1)
    staged = train(tmp_path / "staged", device, "allreduce", "--layout", "pipeline(stages=2)", script=wide)
    staged.check(device)
    assert staged.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        ("pipeline(stages=2, micro_batches=3, recompute=True)", "far"),
        pytest.param("pipeline(stages=2)", "far", marks=pytest.mark.long),
        pytest.param("pipeline(stages=2, micro_batches=3, recompute=True)", "cuda", marks=pytest.mark.gpu),
        pytest.param("pipeline(stages=2)", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_stages_on_the_device_equal_a_single_process(layout: str, device: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", device, "allreduce", workers=1)
    staged = train(tmp_path / "staged", device, "allreduce", "--layout", layout, workers=2)
    staged.check(device)
    assert staged.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("device", [FAR_LONG, CUDA])
def test_workers_in_stages_on_the_device_train_together(device: str, tmp_path: Path) -> None:
    layout = ("--layout", "pipeline(stages=2)")
    train(tmp_path / "run", device, "local_sgd(every=4)", *layout, workers=4).check(device)


@pytest.mark.gpu
def test_workers_that_share_a_gpu_use_the_memory_of_the_host_and_say_so(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "cuda", "allreduce", CUDA_VISIBLE_DEVICES="0")
    run.check("cuda")
    assert "share a device" in run.output


@pytest.mark.parametrize("device", [NCCL, CUDAS])
def test_nccl_and_gloo_compute_the_same_mean(device: str, tmp_path: Path) -> None:
    nccl = train(tmp_path / "nccl", device, "allreduce")
    assert "pass through the memory" not in nccl.output
    gloo = train(tmp_path / "gloo", "cuda", "allreduce", CUDA_VISIBLE_DEVICES="0")
    assert nccl.losses == pytest.approx(gloo.losses, rel=1e-4)


LOOPS = [
    pytest.param(loop, layout, id=f"{loop}-{layout}")
    for loop in ("plain", "scaled", "compiled", "meta", "default")
    for layout in ("whole()", "pipeline(stages=2)", "sharded(over=2)")
]


@pytest.mark.parametrize(("loop", "layout"), LOOPS)
@pytest.mark.parametrize("device", [CPU_LONG, NCCL])
def test_loops_and_layouts_on_the_device_equal_one_process(device: str, loop: str, layout: str, tmp_path: Path) -> None:
    """Within 1e-5, or 1e-2 in half precision. One process has the batches of all workers."""
    batch = "16" if layout == "whole()" else "8"
    single = ("--loop", "plain" if loop == "compiled" else loop, "--batch", batch)
    alone = train(tmp_path / "alone", device, "allreduce", script=single, workers=1)
    run = train(tmp_path / "run", device, "allreduce", "--layout", layout, script=("--loop", loop))
    run.check(device, is_synchronous="sharded" not in layout)
    assert run.losses == pytest.approx(alone.losses, rel=1e-2 if loop == "scaled" else 1e-5)


@pytest.mark.parametrize("layout", ["whole()", "pipeline(stages=2)"])
def test_runs_with_a_default_device_train(layout: str, tmp_path: Path) -> None:
    """With a device of the tests as torch's default, where tensors that name no device are not on the CPU."""
    for recipe in ("allreduce", "async_sgd")[: 2 if layout == "whole()" else 1]:
        run = train(tmp_path / recipe, "far", recipe, "--layout", layout, script=("--loop", "default"))
        run.check("far", is_synchronous=recipe == "allreduce")


@pytest.mark.gpu
def test_processes_of_a_sharded_worker_that_share_a_gpu_are_refused(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "cuda", "allreduce", "--layout", "sharded(over=2)")
    assert run.code != 0
    assert "processes of a sharded worker share a GPU" in run.output


@pytest.mark.gpu
def test_the_memory_of_a_process_on_the_device_is_its_part(tmp_path: Path) -> None:
    """Parameters, gradients and the two numbers of AdamW are divided."""
    layers, model = 24, 24 * 2048 * 2049 * 4
    sharded = peaks(tmp_path / "sharded", "sharded(over=2)", layers)
    assert max(sharded) < 1.1 * 5 * model / 2, sharded  # AdamW computes with one more number for each
    staged = peaks(tmp_path / "staged", "pipeline(stages=2)", layers)
    assert sum(staged) < 1.1 * 7 * model, staged  # two sets of gradients, and those of a micro-batch


@pytest.mark.parametrize("device", [CPU_LONG, CUDA])
def test_workers_on_the_device_exchange_encrypted(device: str, tmp_path: Path) -> None:
    train(tmp_path / "run", device, "diloco(every=4)", "--listen", "127.0.0.1").check(device)


@pytest.mark.parametrize("layout", ["pipeline(stages=2)", "sharded(over=2)"])
@pytest.mark.parametrize("device", [CPU_LONG, NCCL])
@pytest.mark.parametrize("signal", ["killed", "stopped"])
def test_a_failed_rank_on_the_device_is_replaced(device: str, layout: str, signal: str, tmp_path: Path) -> None:
    script = ("--epochs", "6", "--kill", "1", *(["--stop"] if signal == "stopped" else []))
    options = ("--layout", layout, "--failure-timeout", "4s")
    run = train(tmp_path / "run", device, "local_sgd(every=4)", *options, script=script, workers=4)
    run.check(device)
    assert run.failures == 1
