"""The ways to train that the laboratory compares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.learning_tasks import SHAKESPEARE
from benchmarks.race import LR, AdamW, Sgd, Way, alone, averaging, ddp, stretto_way, with_fp16_hook, with_power_sgd_hook


def _ours(recipe: str, every: int = 1, against: str = "", **more: Any) -> Way:
    return Way(stretto_way, recipe=recipe, every=every, against=against, **more)


def _writing(recipe: str, every: int = 1, passes: int = 2, **more: Any) -> Way:
    terms: dict[str, Any] = {"course": SHAKESPEARE, "optimizer": AdamW(), "clip": 1.0, "least_between": 15}
    return _ours(recipe, every, passes=passes, **terms | more)


WAYS: Mapping[str, Way] = {
    "alone": Way(alone, hosts=1),
    "torch DDP": Way(ddp),
    "allreduce": _ours("allreduce", against="torch DDP"),
    "torch DDP fp16": Way(ddp, wrap=with_fp16_hook),
    "allreduce fp16": _ours('allreduce(how=cast("fp16"))', against="torch DDP fp16"),
    "allreduce bf16": _ours('allreduce(how=cast("bf16"))', against="torch DDP fp16"),
    "averaging 16": Way(averaging, every=16),
    "local_sgd 16": _ours('local_sgd(every=16, optimizer_state="keep")', 16, "averaging 16"),
    "averaging 64": Way(averaging, every=64),
    "local_sgd 64": _ours('local_sgd(every=64, optimizer_state="keep")', 64, "averaging 64"),
    "diloco 64": _ours("diloco(every=64)", 64),
}

DOUBLE_STEP = Sgd(2 * LR, momentum=0.0)
"""For codecs with momentum, which drop the momentum of the sent values."""

FEWER: Mapping[str, Way] = {
    "alone": Way(alone, hosts=1),
    "torch DDP": Way(ddp),
    "torch DDP fp16": Way(ddp, wrap=with_fp16_hook),
    "torch DDP PowerSGD": Way(ddp, wrap=partial(with_power_sgd_hook, rank=2)),
    "local_sgd 16": WAYS["local_sgd 16"],
    "local_sgd 64": WAYS["local_sgd 64"],
    "power_sgd": _ours("power_sgd(rank=2)"),
    "deep_gradient_compression": _ours("deep_gradient_compression(ratio=0.01)", optimizer=DOUBLE_STEP),
    "top_k": _ours("allreduce(how=error_feedback(top_k(0.01)))"),
    "local_sgd 16, 4 bits": _ours("local_sgd(every=16, how=quantise(4))", 16),
    "local_sgd 16, top_k": _ours("local_sgd(every=16, how=error_feedback(top_k(0.05)))", 16),
    "local_sgd 64, 4 bits": _ours("local_sgd(every=64, how=quantise(4))", 64),
    "sparse_loco 16": _ours("sparse_loco(every=16)", 16),
    "diloco 64, 4 bits": _ours("diloco(every=64, how=quantise(4))", 64),
    "async_sgd": _ours(
        "async_sgd(weight=0.25, how=both_ways(error_feedback(top_k(0.01)), top_k(0.01)))", least_between=64
    ),
}
"""PowerSGD with rank 2, since rank 1 needs a quarter more steps. sparse_loco every 16 steps, since every 64 steps it
needs a third more. Deep gradient compression with the learning rate of the others takes half as long again.
"""

WRITING: Mapping[str, Way] = {
    "allreduce": _writing("allreduce", passes=1),
    "allreduce, 2 passes": _writing("allreduce"),
    "diloco": _writing("diloco(every=15)", 15),
    "sparse_loco": _writing("sparse_loco(every=15, k=512)", 15),
    "power_sgd": _writing("power_sgd(rank=8)"),
    "deep_gradient_compression": _writing(
        "allreduce(how=deep_gradient_compression(0.03, clip=1.0))",
        passes=3,
        optimizer=Sgd(lr=0.4, momentum=0.0),
        clip=None,
    ),
}
"""Ways of the contest on Shakespeare. The first sets the target. The learning rate of the others falls over two or
three epochs, of which they need a part; allreduce with two epochs is there for comparison. sparse_loco with 64 of 4096
does not reach the target in two epochs. Deep gradient compression has its momentum and its clipping in the codec, so it
uses SGD instead of AdamW.
"""

CONTESTS: Mapping[str, Mapping[str, Way]] = {"lab": WAYS, "fewer": FEWER, "shakespeare": WRITING}
