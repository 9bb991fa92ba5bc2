"""Loading of the C++ module, with a message where it was not built."""

import json
from typing import Any

from bagualu.errors import JobFailed
from bagualu.model_spec import ModelSpec


def load_runtime() -> Any:
    """bagualu._runtime. Throws JobFailed; loads torch first, whose libraries it needs."""
    import torch  # noqa: F401

    try:
        from bagualu import _runtime  # type: ignore[attr-defined]
    except ImportError as error:
        raise JobFailed(f"the C++ module bagualu._runtime cannot be loaded ({error}); "
                        "`make build` builds it") from None
    return _runtime


def lone_trainer(spec: ModelSpec, **options: Any) -> Any:
    """A trainer in a process without ranks, without a budget, for all but training.

    options: seq, and what differs from one fp32 sequence per micro-batch on one rank.
    """
    runtime = load_runtime()
    runtime.arena_install(0)
    defaults = {"rank": 0, "world_size": 1, "ep_size": 1, "micro_batch_size": 1,
                "microbatches": 1, "dtype": "fp32", "seed": 0, "policy": "save-all",
                "profile": None}
    return runtime.Trainer(spec.to_json(), json.dumps(defaults | options), "", "", "")
