"""The training loop of one rank. Who launches it and what a failure does is train.py's."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagualu import checkpoint
from bagualu.data import Sampler, load_domains
from bagualu.distributed import Comm, FailureNote
from bagualu.errors import Infeasible, JobFailed
from bagualu.hf import Shard
from bagualu.preflight import Job
from bagualu.progress import Progress, mitigation_line, proposal
from bagualu.run_log import RunLog, Totals, step_record, trace_file
from bagualu.runtime_module import forecast, load_runtime
from bagualu.units import format_bytes


def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up from peak / warmup, then half a cosine down to `final` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def check_floor(floor: dict[str, Any], budget_bytes: int | None) -> None:
    """Throws Infeasible with the missing bytes."""
    need = floor["floor_bytes"]
    if budget_bytes is not None and budget_bytes < need:
        missing = need - budget_bytes
        raise Infeasible(
            f"infeasible: --budget {format_bytes(budget_bytes)} is under the floor of "
            f"{format_bytes(need)} ({need} bytes) by {missing} bytes; "
            f"--budget {-(-need // 2**20)}MiB would fit", missing)


# Of Job.trainer_options(): what graphs, budgets, policies and the order of passes follow from.
_REPLAYED_OPTIONS = ("world_size", "ep_size", "pp_size", "virtual_per_rank", "stage_layers",
                     "pipeline", "overlap", "micro_batch_size", "seq", "microbatches", "dtype",
                     "policy", "policy_args", "budget_bytes", "host_budget_bytes", "chunk_rows",
                     "allow_quantise", "link_bytes_per_s", "link_latency_us")
_FORECAST = ("static_bytes", "floor_bytes", "calm_peak_bytes", "worst_save_all_bytes")


def forecast_all(runtime: Any, job: Job, comm: Comm) -> list[dict[str, Any]]:
    """Every rank's bytes, by rank, before anything is allocated: stages differ in what they need.

    Throws Infeasible, the same on every rank, if one of them is over the budget.
    """
    texts = comm.gather(forecast(runtime, job.spec, job.trainer_options(comm.rank)))
    forecasts: list[dict[str, Any]] = json.loads(comm.broadcast(f"[{','.join(texts)}]"))
    check_floor(heaviest(forecasts), job.args.budget)
    return forecasts


def heaviest(forecasts: list[dict[str, Any]]) -> dict[str, Any]:
    return max(forecasts, key=lambda entry: int(entry["floor_bytes"]))


def _check_finite(answer: dict[str, Any], step: int) -> None:
    """JSON has null for NaN. The trainer left the weights as they were; all ranks see the same."""
    for name in ("loss", "grad_norm"):
        if answer[name] is None:
            raise JobFailed(f"step {step}: {name} is not finite; the last checkpoint is intact, "
                            "a lower --lr or more --warmup may help")


class Session:
    """Owns: the trainer and, on rank 0, the log. The rest comes from train.py."""

    def __init__(self, job: Job, comm: Comm, trainer: Any, forecasts: list[dict[str, Any]],
                 stop: Callable[[], bool]) -> None:
        """forecasts: by rank, see forecast_all()."""
        self.job, self.comm, self.trainer, self._stop = job, comm, trainer, stop
        args = job.args
        self.leader = comm.rank == 0
        self.forecasts, self.floor = forecasts, heaviest(forecasts)
        self.current_step = job.first_step
        self._shard = Shard.of(job.spec, job.layout, comm.rank)
        self._load_weights()
        history = job.resume.history() if job.resume else ([], [])
        self.totals = Totals(job.world, history)
        self._sampler = Sampler(load_domains(args.data, args.seq), args.seed, args.seq,
                                job.domain_slots)
        # numpy memory: text is no part of the device budget.
        self._tokens = np.empty((args.micro_batches, args.micro_batch_size, args.seq + 1), "int64")
        self._claim = checkpoint.claim(Path(args.checkpoint)) \
            if self.leader and args.checkpoint else None
        path = Path(args.log) if self.leader and args.log else None
        start = self._start_record() if args.log else {}
        self.log = RunLog(path, self._run_record(), job.first_step)
        self.log.write("start", **start)
        if path is not None and job.first_step == 0:
            for rank in range(job.world):  # another run's: they are no part of this log
                trace_file(path, rank).unlink(missing_ok=True)
        self.progress = Progress(args.quiet or not self.leader)
        self._writer = self._tensorboard() if self.leader and args.tensorboard else None

    def _load_weights(self) -> None:
        args, job = self.job.args, self.job
        if job.resume:
            checkpoint.restore(job.resume, self.trainer, self._shard)
        elif args.hf:
            checkpoint.restore_weights(Path(args.hf), self.trainer, job.spec, self._shard)
        elif args.init:
            path = Path(args.init)
            if (path / "latest").exists():
                path = checkpoint.find(path)
            checkpoint.restore_weights(path, self.trainer, job.spec, self._shard)
        else:
            self.trainer.init_parameters(args.seed)
            self.trainer.parameters_changed()

    def _run_record(self) -> dict[str, Any]:
        job, args, layout = self.job, self.job.args, self.job.layout
        ranks = [{"rank": rank, "pp_rank": layout.pp_rank(rank), "stages": layout.stages_of(rank),
                  "layers": layout.layers_of(rank), **{key: floor[key] for key in _FORECAST}}
                 for rank, floor in enumerate(self.forecasts)]
        return {"policy": args.policy, "world_size": job.world, "ep": layout.ep, "pp": layout.pp,
                "vpp": layout.stages_per_rank, "pipeline": layout.pipeline,
                "stage_layers": list(layout.stage_layers), "overlap": args.overlap == "on",
                "slow_link": vars(args.slow_link) if args.slow_link else None,
                "dtype": args.dtype, "seed": args.seed, "budget_bytes": args.budget,
                "host_budget_bytes": args.host_budget,
                "static_bytes": self.floor["static_bytes"],
                "floor_bytes": self.floor["floor_bytes"], "ranks": ranks, "model": json.loads(job.spec.to_json()),
                "micro_batch_size": args.micro_batch_size, "seq": args.seq,
                "microbatches": args.micro_batches, "steps": args.steps,
                "trace_step": args.trace_step, "argv": args.argv}

    def _start_record(self) -> dict[str, Any]:
        """What a replay needs to decide as this start does; every rank takes part. Rank 0's."""
        live_bytes = load_runtime().arena_stats()["live_bytes"]
        texts = self.comm.gather(json.dumps(json.loads(self.trainer.start_json())
                                            | {"live_bytes": live_bytes}))
        if not self.leader:
            return {}
        starts = [json.loads(text) for text in texts]
        profiles: list[Any] = []
        for start in starts:
            if start["profile"] not in profiles:
                profiles.append(start["profile"])
        options = self.job.trainer_options(0)
        return {"first_step": self.job.first_step,
                "options": {key: options[key] for key in _REPLAYED_OPTIONS},
                "live_bytes": [start["live_bytes"] for start in starts],
                "attention_scratch_bytes": starts[0]["attention_scratch_bytes"],
                "profiles": profiles,
                "profile_of": [profiles.index(start["profile"]) for start in starts]}

    def _tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        return SummaryWriter(self.job.args.tensorboard)

    def run(self) -> dict[str, Any]:
        """Trains to the last step, or until a stop was asked for. Returns the summary."""
        args = self.job.args
        step, stopped = self.job.first_step, False
        self.comm.barrier()  # the step's waits are short, loading of weights may not be
        while step < args.steps and not stopped:
            stopped = self._step(step)
            step += 1
            if args.validate_every and step % args.validate_every == 0:
                self._validate(step - 1)
            last = stopped or step == args.steps
            if args.checkpoint and (last or (args.checkpoint_every
                                             and step % args.checkpoint_every == 0)):
                self._checkpoint(step)
        if stopped and self.leader:
            saved = "; a checkpoint was written" if args.checkpoint else ""
            self.progress.say(f"stopped by a signal after step {step}{saved}")
        return self._finish()

    def _extras(self, step: int) -> dict[str, Any]:
        job, args = self.job, self.job.args
        spikes = [{"layers": list(s.layers), "factor": s.factor} for s in args.spike
                  if s.active(step)]
        routing = job.trace.routing(step, args.micro_batches, job.spec) if job.trace else None
        extras = {"spikes": spikes, "routing": routing, "want_memory": bool(args.log),
                  "stop_requested": self._stop()}
        if step in (args.trace_step or ()):
            extras["trace_path"] = str(trace_file(args.log, self.comm.rank))
        return extras

    def _step(self, step: int) -> bool:
        """One optimizer step on every rank; True if any rank was asked to stop."""
        self.current_step = step
        args, layout = self.job.args, self.job.layout
        shape = (args.micro_batches, args.micro_batch_size)
        domains = self._sampler.step_tokens(step, layout.dp_rank(self.comm.rank), layout.dp_size,
                                            shape, self._tokens)
        lr = learning_rate(step, args.steps, args.warmup, args.lr, args.min_lr)
        start = time.perf_counter_ns()
        answer = json.loads(self.trainer.step(torch.from_numpy(self._tokens), step, lr,
                                              json.dumps(self._extras(step))))
        step_ns = time.perf_counter_ns() - start
        _check_finite(answer, step)
        if step != self.job.first_step and not answer["mitigations"]:
            answer["memory"] = None  # not logged, so not sent
        answers = [json.loads(text) for text in self.comm.gather(json.dumps(answer))]
        if self.leader:
            tokens = args.micro_batches * args.micro_batch_size * args.seq * layout.dp_size
            self._record(step_record(step, answers, lr, domains, tokens, step_ns), answers)
        return bool(answer["stop"])

    def _record(self, record: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        step = record["step"]
        self.totals.add(record)
        self.log.write("step", **record)
        lines = [{"step": step, "rank": rank, **mitigation}
                 for rank, answer in enumerate(answers) for mitigation in answer["mitigations"]]
        for line in lines:
            self.log.write("mitigation", **line)
        if lines:  # one line per step: the dearest decision stands for all
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            self.progress.say(mitigation_line(max(lines, key=lambda m: m["cost_ns"])) + more)
        traced = [a for a in answers if a.get("memory")]
        if traced:
            top = max(traced, key=lambda a: a["peak_bytes"])
            self.log.write("memory", step=step, rank=top["rank"], points=top["memory"])
        self.progress.step(record, self.job.args.steps, self.job.args.budget)
        if self._writer is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_s"):
                self._writer.add_scalar(name, record[name], step)
            self._writer.add_scalar("peak_bytes", max(r["peak_bytes"] for r in record["ranks"]),
                                    step)
            self._writer.add_scalar("imbalance", max(record["imbalance"], default=1.0), step)

    def _validate(self, step: int) -> None:
        args, layout = self.job.args, self.job.layout
        tokens = np.empty_like(self._tokens)
        self._sampler.validation_tokens(layout.dp_rank(self.comm.rank), layout.dp_size,
                                        (args.micro_batches, args.micro_batch_size), tokens)
        loss = self.trainer.evaluate(torch.from_numpy(tokens))
        if self.leader:
            self.log.write("validation", step=step, loss=loss)
            self.progress.say(f"step {step + 1}: validation loss {loss:.4f}")

    def _checkpoint(self, step: int) -> None:
        args, totals = self.job.args, self.totals
        path = checkpoint.save(Path(args.checkpoint), self.trainer, self.job.spec,
                               self.job.layout, self.job.position(step),
                               (list(totals.losses), list(totals.grad_norms)), self.comm,
                               args.keep)
        self.log.write("checkpoint", step=step, path=str(path))

    def _finish(self) -> dict[str, Any]:
        args = self.job.args
        summary = self.totals.summary(args.policy, args.budget, oom=False)
        if self.leader:
            self.log.write("summary", **summary)
            self.progress.end_line()
            if args.budget is None and self.totals.step_peaks:
                self.progress.say(proposal(list(self.totals.step_peaks),
                                           self.floor["floor_bytes"]))
        self.close()
        return summary

    def record_failure(self, note: FailureNote) -> dict[str, Any]:
        """Rank 0 writes why the job ended; the summary says how far it came."""
        if note.oom is not None:
            self.log.write("oom", **note.oom)
        summary = self.totals.summary(self.job.args.policy, self.job.args.budget,
                                      oom=note.oom is not None)
        self.log.write("summary", **summary)
        self.progress.end_line()
        self.close()
        return summary

    def close(self) -> None:
        self.log.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None
        if self._writer is not None:
            self._writer.close()


def dry_run_report(trainer: Any, job: Job, comm: Comm, forecasts: list[dict[str, Any]]
                   ) -> dict[str, Any]:
    """Floor, plan and predictions of the heaviest rank; with several stages also by rank."""
    layout, floor = job.layout, heaviest(forecasts)
    plans = [json.loads(text) for text in comm.gather(trainer.plan_json())]
    report = {"budget_bytes": job.args.budget, "floor": floor,
              "plan": plans[forecasts.index(floor)] if plans else None}
    if layout.stages > 1:
        report["ranks"] = [{"rank": rank, "pp_rank": layout.pp_rank(rank),
                            "stages": layout.stages_of(rank), "layers": layout.layers_of(rank),
                            "floor": forecasts[rank], "plan": plan}
                           for rank, plan in enumerate(plans)]
    return report
