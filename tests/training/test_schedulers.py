"""Facts about learning-rate schedulers that all workers must find alike."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

ORDER = dedent(
    """
    import gc, sys
    import torch
    from torch.optim.lr_scheduler import CosineAnnealingLR, ConstantLR, LinearLR, SequentialLR

    optimizer, parts = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), []
    for index, make in enumerate((LinearLR, lambda one: CosineAnnealingLR(one, 5), ConstantLR, ConstantLR)):
        parts.append(make(optimizer))
        if str(index) in sys.argv:
            gc.collect()
    whole = SequentialLR(optimizer, parts, [3, 6, 9])
    from stretto.training.schedulers import schedulers_of
    print([type(one).__name__ for one in schedulers_of(optimizer)])
    """
)


def test_order_of_schedulers_does_not_depend_on_garbage_collections() -> None:
    orders = {
        subprocess.run([sys.executable, "-c", ORDER, *collected], capture_output=True, text=True, check=True).stdout
        for collected in ([], ["0"], ["1"], ["0", "2"])
    }
    assert len(orders) == 1, orders
