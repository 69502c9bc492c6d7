"""LIBMF, the parallel factorisation of C.-J. Lin's group (https://www.csie.ntu.edu.tw/~cjlin/libmf), built from source.

Its sources are those of the package `libmf` of PyPI, compiled with AVX for this processor.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "libmf==0.9.2"
FLAGS = ["-O3", "-std=c++11", "-pthread", "-march=native", "-DUSEAVX", "-fPIC", "-shared"]
SQUARED_ERROR, BINS = 0, 20
LIMIT_S = 300


class _Options(ctypes.Structure):
    """`mf_parameter` of LIBMF."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("fun", "k", "nr_threads", "nr_bins", "nr_iters")),
        *((name, ctypes.c_float) for name in ("lambda_p1", "lambda_p2", "lambda_q1", "lambda_q2", "eta")),
        *((name, ctypes.c_bool) for name in ("do_nmf", "quiet", "copy_data")),
    )


class Libmf:
    """LIBMF's library, built in a folder. Raise CalledProcessError if its package or a compiler is missing."""

    def __init__(self, folder: Path) -> None:
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", PACKAGE]
        subprocess.run([*get, "--dest", folder], check=True, capture_output=True, timeout=LIMIT_S)
        (archive,) = folder.glob("libmf-*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        sources = [str(one) for one in folder.glob("libmf-*/src_cpp/*.cpp")]
        subprocess.run(["c++", *FLAGS, *sources, "-o", folder / "libmf.so"], check=True, capture_output=True)
        self._library = ctypes.CDLL(str(folder / "libmf.so"))

    def rate(self, known: tuple[Any, Any, Any], rank: int, epochs: int) -> float:
        """Return the values of an epoch for each second of processor time, of one thread."""
        table = np.stack([np.asarray(one, np.float32) for one in known], axis=1).copy()
        return len(table) * epochs / (self._seconds(table, rank, epochs + 1) - self._seconds(table, rank, 1))

    def _seconds(self, table: Any, rank: int, epochs: int) -> float:
        options = _Options(SQUARED_ERROR, rank, 1, BINS, epochs, 0.0, 0.05, 0.0, 0.05, 0.1, False, True, True)
        pointer = table.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        began = time.process_time()
        self._library.fit_interface(ctypes.c_int(len(table)), pointer, ctypes.byref(options))
        return time.process_time() - began
