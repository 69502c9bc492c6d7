"""The counts of a model that counts, and the shares of a worker's work in means, written to a folder.

`benchmarks/counting_model.py` reads from both how often each sample was trained.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from stretto.loader.sample_weights import Weights


class NotedShares:
    """Notes this worker's share in each mean, with the work that it is of, as `shares-WORKER-PID.jsonl`."""

    def __init__(self, folder: Path, worker: int) -> None:
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"shares-{worker}-{os.getpid()}.jsonl").open("a")
        self._since: list[tuple[int, int]] = []
        """Epoch and sample of the work since the last exchange."""
        self._is_carried = self._has_share = False
        """True once an exchange has carried this work; once its share is noted."""
        own_share, carried = Weights.share, Weights.carried

        def noted_share(weights: Weights) -> float:
            self._has_share = True
            self._file.write(json.dumps([own_share(weights), [] if self._is_carried else self._since]) + "\n")
            self._file.flush()
            return own_share(weights)

        def noted_carried(weights: Weights) -> None:  # one worker alone has no part in a mean
            self._has_share or noted_share(weights)
            self._is_carried = True
            carried(weights)

        Weights.share, Weights.carried = noted_share, noted_carried  # type: ignore[method-assign]

    def add(self, epoch: int, samples: Iterable[int]) -> None:
        """Add the samples of a batch, of an epoch from 0, to this worker's work."""
        if self._is_carried:
            self._since, self._is_carried, self._has_share = [], False, False
        self._since += [(epoch, sample) for sample in samples]


def write_counts(folder: Path, epoch: int, worker: int, state: Mapping[str, Tensor]) -> None:
    """Write how often a worker's model has trained each sample in each epoch so far, and a digest of the model."""
    written = folder / f"epoch-{epoch}-{worker}.json"
    counts = [[round(-one, 6) for one in row] for row in state["count.weight"].tolist()]
    digest = hashlib.blake2b(b"".join(one.numpy().tobytes() for one in state.values()), digest_size=8)
    written.with_suffix(".part").write_text(json.dumps({"counts": counts, "digest": digest.hexdigest()}))
    written.with_suffix(".part").replace(written)
