"""Four hosts behind 100 Mbit/s, a model of 19 million parameters: a pipeline within each host against FSDP over all.

Ours: on each host one worker of two stages, and DiLoCo between the workers, by `stretto run --listen` and `join`.
Theirs: eight processes of torch's `fully_shard` over gloo, two on each host. A step of both trains the same samples:
BATCH of each host. `python benchmarks/hybrid.py SIDE FILE` is the program of one process.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto
from benchmarks.laboratory import LINK, PORT, Laboratory, address
from benchmarks.measure import Ratio, save
from benchmarks.pace import ROOT

QUESTION = "steps a second of 4 hosts behind 100 Mbit/s: a pipeline in each host with DiLoCo between, against FSDP"
HOSTS, STAGES, MBIT, BATCH, EVERY, STARTS, WANTED = 4, 2, 100.0, 4, 50, 3, 20.0
WORDS, WIDTH, LENGTH, BLOCKS = 65, 512, 16, 6
OURS, THEIRS = "stretto", "FSDP"
STEPS = {OURS: 2 * EVERY, THEIRS: 3}
"""Steps that are timed, after WARM_UP."""
WARM_UP = {OURS: EVERY, THEIRS: 1}
LIMIT_S = 900.0
LAYOUT = f'pipeline({STAGES}, micro_batches=2, split="{1 + BLOCKS // 2}")'


def network() -> nn.Sequential:
    """Return a transformer of modules one after another."""
    torch.manual_seed(0)
    blocks = (nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, "gelu", batch_first=True) for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def loader(batches: int, size: int, seed: int = 1) -> Any:
    """Return batches of random words, and the words that follow them."""
    words = torch.randint(0, WORDS, (batches * size, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(words[:, :-1].clone(), words[:, 1:].clone()), batch_size=size)


def train(model: nn.Module, batches: Any) -> list[float]:
    """Run the plain loop; return the readings of the clock after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    batches = stretto.distribute(model, optimizer, batches) if not dist.is_initialized() else batches
    times = []
    for x, y in batches:
        optimizer.zero_grad()
        outputs: Tensor = model(x)
        cross_entropy(outputs.flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        times.append(time.perf_counter())
    return times


def work(side: str, file: Path) -> None:
    """Train as one process of a side, and write the seconds of a step."""
    torch.set_num_threads(1)
    steps, model = WARM_UP[side] + STEPS[side], network()
    if side == THEIRS:
        dist.init_process_group("gloo")
        for block in model:
            fully_shard(block)
        fully_shard(model)
        times = train(model, loader(steps, BATCH // STAGES, seed=dist.get_rank()))
        dist.destroy_process_group()
    else:
        times = train(model, loader(HOSTS * steps, BATCH))
    first, last = WARM_UP[side] - 1, WARM_UP[side] + STEPS[side] - 1
    file.with_name(f"{file.name}-{time.monotonic_ns()}").write_text(str((times[last] - times[first]) / STEPS[side]))


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure both sides in turns, print the figures and write them to the results."""
    print(f"hybrid: {QUESTION}", flush=True)
    found: dict[str, list[float]] = {OURS: [], THEIRS: []}
    with Laboratory(HOSTS, MBIT) as laboratory:
        for start in range(starts or STARTS):
            for side in (OURS, THEIRS) if start % 2 else (THEIRS, OURS):
                found[side].append(measure(laboratory, side))
                print(f"  {side}: {found[side][-1]:.3f} s a step", flush=True)
    ratio = Ratio.of([[one] for one in found[OURS]], [[one] for one in found[THEIRS]])
    print(f"  steps a second, {OURS} / {THEIRS}: {ratio} (wanted {WANTED})")
    record = {"question": QUESTION, "wanted": WANTED, "seconds_a_step": found, "ratio": ratio.record()}
    print(f"  kept in {save('hybrid', record, trial=starts is not None)}")
    return record


def measure(laboratory: Laboratory, side: str) -> float:
    """Return the median of the seconds of a step among the processes of a side."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w+b") as log:
        folder = Path(name)
        processes = [
            laboratory.start(host, command, environment, log) for host, command, environment in _commands(side, folder)
        ]
        codes = [process.wait(LIMIT_S) for process in processes]
        if any(codes):
            log.seek(0)
            raise SystemExit(f"hybrid: a process has failed\n{log.read().decode(errors='replace')[-3000:]}")
        return statistics.median(float(file.read_text()) for file in folder.glob("s-*"))


def _commands(side: str, folder: Path) -> Sequence[tuple[int, list[str], dict[str, str]]]:
    """Return the host, the command and the environment of each process to start."""
    script = f"{ROOT}/benchmarks/hybrid.py"
    program, environment = [script, side, str(folder / "s")], {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
    if side == THEIRS:
        meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "WORLD_SIZE": str(HOSTS * STAGES)}
        places = [(rank // STAGES, {"RANK": str(rank)}) for rank in range(HOSTS * STAGES)]
        return [(host, [sys.executable, *program], {**environment, **meeting, **rank}) for host, rank in places]
    stretto_ = [sys.executable, "-m", "stretto.cli"]
    options = [
        "--quiet",
        "-n",
        "0",
        "--min-workers",
        str(HOSTS),
        "--layout",
        LAYOUT,
        "--listen",
        f"{address(0)}:{PORT}",
    ]
    options += ["--recipe", f"diloco(every={EVERY})", "--threads", "1", "--out", str(folder / "run")]
    wait = f"until [ -s {folder}/run/join.key ]; do sleep 0.1; done; cd {folder}; exec"
    join = f"{wait} {' '.join(stretto_)} join {address(0)}:{PORT} --key run/join.key -n {STAGES} --threads 1 --quiet"
    return [
        (0, [*stretto_, "run", *options, *program], environment),
        *((host, ["sh", "-c", f"{join} --script {ROOT}/benchmarks/hybrid.py"], environment) for host in range(HOSTS)),
    ]


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
