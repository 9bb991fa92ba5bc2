"""Rates of this machine as a system file, for `bagualu plan --system this-machine`.

Few rates, measured in about a second beside a profile: enough for a roofline. Copies come from the
profile, which measured them through the runtime's own transfer engine.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from bagualu.profile_cache import processor

FILE_NAME = "this-machine.json"
_GEMM_SIDE = {"float32": 512, "bfloat16": 256}  # bf16 has no fast kernel on many processors
_COPY_BYTES = 64 << 20
_LEAST_RATE = 1e6  # the least that a system file may say


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()  # first touch of memory and code
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(statistics.median(times), 1e-9)


def _link_bytes_per_s(profile: dict[str, Any], row_bytes: int) -> float | None:
    """Slope of the exchange's time over the rows received; None without one."""
    points = profile.get("ops", {}).get("dispatch", {}).get("forward", [])
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    rows, ns = (points[-1][i] - points[0][i] for i in (0, 1))
    return rows * row_bytes * 1e9 / ns


def measure_this_machine(profile: dict[str, Any], threads: int, row_bytes: int) -> dict[str, Any]:
    """A system file (docs/formats.md, System). `row_bytes`: of one row on the wire."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flops = {}
        for name, side in _GEMM_SIDE.items():
            a = torch.ones(side, side, dtype=getattr(torch, name))
            flops[name] = 2 * side**3 / _median_seconds(lambda a=a: a @ a, 9)
        source, target = (torch.ones(_COPY_BYTES // 4) for _ in range(2))
        # A copy reads and writes every byte.
        memory = 2 * _COPY_BYTES / _median_seconds(lambda: target.copy_(source), 7)
        small = torch.ones(16)
        launch_ns = round(_median_seconds(lambda: small.add_(1), 101) * 1e9)
    finally:
        torch.set_num_threads(before)
    link = _link_bytes_per_s(profile, row_bytes)
    host = [max(float(profile[key]), _LEAST_RATE) for key in ("d2h_bytes_per_s",
                                                              "h2d_bytes_per_s")]
    return {
        "format": "bagualu.system", "version": 1, "name": "this-machine",
        "provenance": "measured",
        "source": f"{processor()}, {threads} threads a rank, "
                  f"torch {torch.__version__}: medians of 9 products of 512^3 (fp32) and 256^3 "
                  "(bf16), of 7 copies of 64 MiB, of 101 additions; host copies from the profile; "
                  "link " + ("from the profile's exchange" if link else
                             "not measured with one rank: that of a host copy"),
        "fp32_flops_per_s": max(flops["float32"], _LEAST_RATE),
        "bf16_flops_per_s": max(flops["bfloat16"], _LEAST_RATE),
        "compute_efficiency_fraction": 1.0,
        "memory_bytes_per_s": max(memory, _LEAST_RATE),
        "link_bytes_per_s": max(link or host[0], _LEAST_RATE),
        "d2h_bytes_per_s": host[0],
        "h2d_bytes_per_s": host[1],
        "encode_bytes_per_s": max(float(profile["encode_bytes_per_s"]), _LEAST_RATE),
        "copy_hidden_fraction": profile["copy_hidden_fraction"],
        "launch_ns": launch_ns,
    }
