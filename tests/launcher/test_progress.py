"""The progress display as a function of a run's events."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.launcher.run_status import RECENT_S, Progress
from stretto.membership.loop_positions import LOOP, LoopPosition
from stretto.membership.worker_status import ProcessRecord


def counted(worker: int, t: float, samples: int, waiting: float = 0.0, evaluating: float = 0.0) -> dict[str, Any]:
    split = {"waiting": waiting, "evaluating": evaluating, "computing": t - waiting - evaluating}
    event = {"event": "progress", "t": t, "worker": worker, "step": samples // 8, "samples": samples}
    return event | {"time_breakdown": split, "bytes_sent": 1_500_000, "bytes_received": 0}


def test_rate_is_that_of_all_workers_while_they_train() -> None:
    progress = Progress()
    for second in range(1, 5):
        for worker in range(3):
            progress.take(counted(worker, second * 2.0, second * 100, evaluating=second * 1.0))
    assert progress.samples_per_second() == pytest.approx(300)


def test_rate_covers_only_recent_time() -> None:
    progress = Progress()
    progress.take(counted(0, 100.0, 100))
    for second in range(1, 3 * int(RECENT_S)):
        progress.take(counted(0, 100.0 + second, 100 + 1000 * second))
    assert progress.samples_per_second() == pytest.approx(1000)


def test_waiting_is_a_share_of_all_workers_time() -> None:
    progress = Progress()
    progress.take(counted(0, 10.0, 1, waiting=1.0))
    progress.take(counted(1, 10.0, 1, waiting=4.0))
    assert progress.waiting() == pytest.approx(0.25)


def test_unknown_values_are_not_shown() -> None:
    assert Progress().facts() == []
    assert Progress().samples_per_second() is None


def test_order_of_the_values() -> None:
    progress = Progress()
    progress.take({"event": "start", "worker": 0, "recipe": "allreduce()"})
    progress.take({"event": "epoch", "worker": 0, "epoch": 1, "step": 5})
    progress.take({"event": "log", "worker": 0, "step": 9, "values": {"loss": 0.123456}})
    progress.take({"event": "evaluation", "worker": 0, "epoch": 2, "step": 10, "metrics": {"accuracy": 0.5}})
    progress.take(counted(0, 10.0, 80, waiting=5.0))
    progress.take(counted(1, 10.0, 80))
    assert progress.facts() == [
        "epoch 2",
        "step 10",
        "16 samples/s",
        "loss 0.1235",
        "accuracy 0.5",
        "waiting 25%",
        "sent 1.5 MB per worker",
    ]


def applied(worker: int, *staleness: int) -> dict[str, Any]:
    updates = [[round_, round_, value, 8] for round_, value in enumerate(staleness, 1)]
    return {"event": "update_applied", "t": 1.0, "worker": worker, "updates": updates}


def test_staleness_covers_all_updates_so_far() -> None:
    progress = Progress()
    progress.take(applied(0, 0, 3, 4))
    progress.take(applied(1, 7))
    assert progress.facts() == ["staleness 3.5 mean, 7 max"]
    progress.take(applied(0))
    assert progress.facts() == ["staleness 3.5 mean, 7 max"]


def test_zero_staleness_is_shown() -> None:
    progress = Progress()
    progress.take(applied(0, 0, 0))
    assert progress.facts() == ["staleness 0.0 mean, 0 max"]


def test_lead_of_the_fastest_worker_is_kept_while_a_slow_one_evaluates() -> None:
    progress = Progress()
    progress.take(counted(1, 10.0, 800))
    slow = {"event": "evaluation", "worker": 0, "epoch": 1, "step": 20, "training_s": 1.0, "metrics": {"a": 0.5}}
    assert progress.take(slow) == "epoch 1, step 20: a 0.5 (after 1.0 s of training)"
    assert progress.facts()[0] == "step 100"


def test_events_that_print_a_line() -> None:
    progress = Progress()
    notice = {"event": "warning", "worker": 0, "text": "mind this"}
    assert progress.take(notice) == "note: mind this"
    assert progress.take(notice | {"worker": 1}) is None
    assert Progress(notices=False).take(notice) is None
    evaluation = {"event": "evaluation", "worker": 0, "epoch": 1, "step": 7, "training_s": 1.25, "metrics": {"a": 0.5}}
    assert progress.take(evaluation) == "epoch 1, step 7: a 0.5 (after 1.2 s of training)"
    epoch = {"event": "epoch", "worker": 0, "epoch": 1, "step": 7, "samples": 1797, "training_s": 2.0}
    assert progress.take(epoch) == "epoch 1 ended: step 7, 1,797 samples in 2.0 s of training"
    assert progress.take({"event": "of a later version", "worker": 0}) is None


def test_compression_ratio_of_a_codec_is_shown() -> None:
    progress = Progress()
    progress.take(
        counted(0, 10.0, 80) | {"traffic": {"gradients": [4000, 100, 4000, 300], "evaluation_sync": [0, 9, 0, 9]}}
    )
    progress.take(counted(1, 10.0, 80) | {"traffic": {"gradients": [4000, 300, 4000, 100]}})
    assert progress.facts()[-1] == "encoded in 20.0× fewer bytes"


def test_exact_codec_shows_no_compression() -> None:
    progress = Progress()
    progress.take(counted(0, 10.0, 80) | {"traffic": {"gradients": [4000, 4000, 4000, 4000]}})
    progress.take(counted(1, 10.0, 80))
    assert progress.compression() is None
    assert not [fact for fact in progress.facts() if "fewer" in fact]


def test_epoch_is_shown_from_its_first_step_on() -> None:
    """After the last epoch no further one is named."""
    progress = Progress()
    progress.take({"event": "start", "worker": 0})
    progress.take({"event": "epoch", "worker": 0, "epoch": 1, "step": 5})
    progress.take({"event": "progress", "worker": 0, "step": 5, "t": 1.0})
    assert progress.facts()[0] == "epoch 1"
    progress.take({"event": "progress", "worker": 0, "step": 6, "t": 2.0})
    assert progress.facts()[0] == "epoch 2"
    progress.take({"event": "epoch", "worker": 0, "epoch": 2, "step": 10})
    progress.take({"event": "end", "worker": 0, "step": 10, "t": 3.0})
    assert progress.facts()[:2] == ["epoch 2", "step 10"]


def test_workers_whose_events_are_not_seen_are_followed_by_their_records() -> None:
    progress, waiting = Progress(), ProcessRecord()
    training = [ProcessRecord(place=LoopPosition(LOOP, 2, step), joined=True) for step in (7, 9)]
    assert progress.follow([waiting, waiting]) is None
    assert progress.facts() == ["waiting for the run to begin, or to admit its workers"]
    assert progress.follow([waiting, training[0]]) == "in the run: 1 of 2 workers of this machine"
    assert progress.follow([training[1], training[0]]) == "in the run: 2 of 2 workers of this machine"
    assert progress.follow(training) is None
    assert progress.facts() == ["epoch 2", "step 9"]


def test_rate_of_a_restarted_worker_is_that_since_its_restart() -> None:
    """Each incarnation counts its samples from zero; the rate was negative for a while."""
    progress = Progress()
    progress.take({"event": "start", "t": 0.0, "worker": 0})
    progress.take(counted(0, 10.0, 800))
    progress.take({"event": "start", "t": 12.0, "worker": 0})
    progress.take(counted(0, 14.0, 100))
    assert progress.samples_per_second() == pytest.approx(50)


def test_finished_run_that_is_resumed_shows_its_last_epoch_and_no_rate() -> None:
    progress = Progress()
    progress.take({"event": "start", "t": 10.0, "worker": 0, "epochs": 2, "step": 16})
    progress.take({**counted(0, 10.1, 0), "event": "end", "step": 16, "bytes_sent": 0})
    assert progress.facts()[:2] == ["epoch 2", "step 16"]
    assert not any("samples/s" in fact for fact in progress.facts())


def test_resumed_run_shows_the_epoch_that_it_continues() -> None:
    progress = Progress()
    progress.take({"event": "start", "t": 10.0, "worker": 0, "epochs": 2, "step": 16})
    progress.take({**counted(0, 12.0, 8), "step": 17})
    assert progress.facts()[0] == "epoch 3"
    assert progress.samples_per_second() == pytest.approx(4)
