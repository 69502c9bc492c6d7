"""Figures on GPUs, beside torch's DistributedDataParallel and the speed of memory: `make bench-gpu`.

Four questions, each with both sides in one run, in turns:

- speed: steps of `allreduce` against DDP, through NCCL with a GPU for each worker, and with two workers on one GPU
- means: the time of one small mean, of torch, of a run without recovery, and of one with recovery, which waits for the
  GPU in each mean
- overhead: a step of one process with `stretto.distribute` against the plain loop, in microseconds
- memory: the peak of a worker's memory on the device, beside that of DDP
- codecs: encoding and decoding 25 million numbers, relative to copying them once

On a machine without a GPU only the tests run it, on the CPU.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import stretto
from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import Pace, in_turns, take_turns, worker_groups
from benchmarks.tasks import BATCH, build, samples
from stretto.codecs.base import Block, CodecContext
from stretto.collective_ops import AllReduceMean
from stretto.process_config import worker_config
from stretto.recipe.parser import parse
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.transport.env_rendezvous import open_store
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import over_shared_memory
from stretto.transport.single_worker import SingleWorkerTransport

WORKERS = 2
LIMIT_S, FAILURE_S = 60.0, 10.0
MEAN_NUMBERS = 1024
CODECS = ("top_k(0.01)", "sign()", "power_sgd(rank=4)")
NO_GPU = "bench-gpu needs a GPU, and torch finds none on this machine"


@dataclass(frozen=True)
class Scale:
    """Size of the measurements."""

    cases: Sequence[str] = ("0.8 M", "25 M")
    starts: int = 3
    repetitions: int = 6
    segment: int = 32
    numbers: int = 5000 * 5000

    @property
    def is_trial(self) -> bool:
        """True if the scale is smaller than that of stored results."""
        return self != Scale()


# --- sides, each in processes of its own ------------------------------------------------------------------------------


def _device(case: str) -> tuple[torch.device, str, str]:
    """Return this worker's device, "own" or "shared", and the task, from a case such as "cuda own 0.8 M"."""
    kind, place, task = case.split(maxsplit=2)
    if kind != "cuda":
        return torch.device(kind), place, task
    device = torch.device(kind, 0 if place == "shared" else int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, place, task


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stepper(pace: Pace, device: torch.device) -> Callable[[], None]:
    """Return a function that counts a step, and waits for the device at the end of each segment."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done % pace.segment == 0:
            _wait_for(device)
        pace.step()

    return step


def _init_torch(device: torch.device, place: str) -> None:
    dist.init_process_group("nccl" if device.type == "cuda" and place == "own" else "gloo")


def _prepared(side: str, case: str, workers: int) -> tuple[torch.device, nn.Module, Any, Any]:
    """Return the device, the model to call, its optimizer and the loader of a side."""
    device, place, name = _device(case)
    model, _, task = build(name)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = samples(replace(task, repetitions=Scale().repetitions, segment=Scale().segment), workers)
    if side == "torch DDP":
        _init_torch(device, place)
        ids = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids)
        return device, wrapped, optimizer, DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    if side == "stretto":
        loader = stretto.distribute(model, optimizer, loader, recipe="allreduce")
    return device, model, optimizer, loader


def _steps(side: str, case: str, workers: int) -> Iterator[torch.device]:
    """Train, and yield the device after each step."""
    device, model, optimizer, loader = _prepared(side, case, workers)
    yield device
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        yield device


def _loop(side: str, workers: int, case: str, pace: Pace) -> None:
    """Run a side's loop in segments."""
    steps = _steps(side, case, workers)
    step = _stepper(pace, next(steps))
    pace.begin()
    for _ in steps:
        step()


def _memory(side: str, case: str, pace: Pace) -> None:
    """Train for a segment, then report the peak of memory on the device in MiB in the place of seconds."""
    steps = _steps(side, case, WORKERS)
    device = next(steps)
    pace.begin()
    for _ in range(pace.segment):
        next(steps)
    print(_peak_mib(device), 0.0, flush=True)
    pace.begin()


def _peak_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device) / 2**20)
    return float(psutil.Process().memory_info().rss / 2**20)


def _means(kind: str, case: str, pace: Pace) -> None:
    """Compute small means one after another."""
    device, place, _ = _device(case)
    mean = _mean(kind, device, place)
    tensor = torch.ones(MEAN_NUMBERS, device=device)
    step = _stepper(pace, device)
    pace.begin()
    while True:
        mean(tensor.fill_(1.0))
        step()


def _mean(kind: str, device: torch.device, place: str) -> Callable[[Tensor], object]:
    if kind == "torch":
        _init_torch(device, place)
        return dist.all_reduce
    config = worker_config()
    assert config is not None
    store = open_store(config, LIMIT_S)
    elastic = kind == "with recovery"
    group = ProcessGroupTransport(store, config.worker, config.world_size, LIMIT_S, elastic=elastic)
    transport = over_shared_memory(group, device, FAILURE_S)
    return lambda tensor: transport.submit(AllReduceMean(tensor)).wait()


SPEED = ("stretto", "torch DDP")
MEANS = ("without recovery", "torch", "with recovery")
SIDES: dict[str, Callable[[str, Pace], None]] = {
    **{side: functools.partial(_loop, side, WORKERS) for side in SPEED},
    **{f"one process, {side}": functools.partial(_loop, side, 1) for side in ("stretto", "plain")},
    **{f"memory, {side}": functools.partial(_memory, side) for side in SPEED},
    **{f"mean, {kind}": functools.partial(_means, kind) for kind in MEANS},
}

# --- measures ---------------------------------------------------------------------------------------------------------


def _seconds(sides: Sequence[str], case: str, scale: Scale, workers: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each side's segments, by start."""
    found: dict[str, list[list[float]]] = {side: [] for side in sides}
    for _ in range(scale.starts):
        with worker_groups("benchmarks.gpu", sides, case, scale.segment, workers) as started:
            for side, segments in take_turns(started, scale.repetitions).items():
                found[side].append([one.wall for one in segments])
    return found


def _compared(sides: Sequence[str], case: str, scale: Scale, workers: int = WORKERS) -> dict[str, Any]:
    """Return the microseconds of a step of each side, and the speed of each relative to the second."""
    found = _seconds(sides, case, scale, workers)
    record: dict[str, Any] = {}
    for side, starts in found.items():
        step = Spread.of([1e6 * one / scale.segment for start in starts for one in start])
        ratio = Ratio.of(starts, found[sides[1]])
        print(f"  {case}, {side}: {step.median:.1f} us a step, speed {ratio} of {sides[1]}", flush=True)
        record[side] = {"us_a_step": step.record(), "speed": ratio.record()}
    return record


def _peaks(case: str, scale: Scale) -> dict[str, Any]:
    """Return the peak of memory of each side in MiB, and the ratio."""
    sides = [f"memory, {side}" for side in SPEED]
    with worker_groups("benchmarks.gpu", sides, case, scale.segment, WORKERS) as started:
        ours, theirs = (started[side].segment().wall for side in sides)
    print(f"  {case}: {ours:.0f} MiB, DDP {theirs:.0f} MiB, ratio {ours / theirs:.3f}", flush=True)
    return {"stretto_mib": ours, "ddp_mib": theirs, "ratio": ours / theirs}


def _codec_record(text: str, device: torch.device, scale: Scale) -> dict[str, Any]:
    """Return the seconds of a codec and of a copy of the same numbers, and the ratio."""
    codec = parse(text if text.startswith("power") else f"allreduce(how=error_feedback({text}))").how
    side = int(scale.numbers**0.5)
    x = torch.randn(side * side, device=device)
    context = CodecContext(blocks=[Block("numbers", 0, side * side, (side, side))])
    state, scratch, transport = codec.init_state(x, context), torch.empty_like(x), SingleWorkerTransport()

    def timed(act: Callable[[], object]) -> float:
        scratch.copy_(x)
        _wait_for(device)
        began = time.perf_counter()
        act()
        _wait_for(device)
        return time.perf_counter() - began

    sides = {
        "codec": lambda: timed(lambda: finish([CollectiveRunner(transport, codec.average(scratch, state))])),
        "copy": lambda: timed(lambda: scratch.copy_(x)),
    }
    taken = in_turns(sides, scale.repetitions)
    codec_s, copy_s = (Spread.of(taken[name]) for name in ("codec", "copy"))
    ratio = Ratio.of([taken["copy"]], [taken["codec"]])
    print(f"  {text}: {1e3 * codec_s.median:.2f} ms, {ratio} copies of the numbers", flush=True)
    return {"codec_s": codec_s.record(), "copy_s": copy_s.record(), "copies": ratio.record()}


def measure(kind: str, places: Sequence[str], scale: Scale) -> dict[str, Any]:
    """Measure everything on a kind of device."""
    cases = [f"{kind} {place} {task}" for place in places for task in scale.cases]
    one = f"{kind} own {scale.cases[0]}"
    alone = ("one process, stretto", "one process, plain")
    device = torch.device(kind)
    return {
        "scale": {"starts": scale.starts, "segments": scale.repetitions, "steps": scale.segment},
        "speed": {case: _compared(SPEED, case, scale) for case in cases},
        "means": {
            place: _compared([f"mean, {each}" for each in MEANS], f"{kind} {place} {scale.cases[0]}", scale)
            for place in places
        },
        "overhead": _overhead(_compared(alone, one, scale, workers=1)),
        "memory": {case: _peaks(case, scale) for case in cases},
        "codecs": {text: _codec_record(text, device, scale) for text in CODECS},
    }


def _overhead(sides: Mapping[str, Any]) -> dict[str, Any]:
    ours, plain = (one["us_a_step"]["median"] for one in sides.values())
    print(f"  overhead of a step: {ours - plain:.1f} us", flush=True)
    return {**sides, "us": ours - plain}


def run(scale: Scale = Scale()) -> dict[str, Any]:
    """Measure on the GPUs of this machine, and store the results."""
    if not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    places = ("shared", "own") if torch.cuda.device_count() >= WORKERS else ("shared",)
    found = {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), **measure("cuda", places, scale)}
    print(f"  kept in {save('gpu', found, trial=scale.is_trial)}")
    return found


if __name__ == "__main__":
    run()
