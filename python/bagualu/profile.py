"""`bagualu profile`: measures operator times of a model on this machine and keeps them.

The ranks of one expert-parallel group measure together, since the all-to-all is one of the
operators. `bagualu train` finds the kept file by itself; --profile FILE gives another. A few rates
of the machine are kept beside it, for `bagualu plan --system this-machine`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bagualu import launch
from bagualu.errors import EXIT_OK, BagualuError, InvalidInput
from bagualu.model_spec import resolve_model
from bagualu.preflight import check_file, check_folder
from bagualu.profile_cache import cache_file, default_folder, store_profile
from bagualu.this_machine import FILE_NAME, measure_this_machine
from bagualu.train_args import WHERE, Parser


def _parser() -> Parser:
    parser = Parser(prog="bagualu profile", description="Measure operator times and copy "
                    "bandwidth of this machine for a model. Times in ns, sizes in bytes.")
    parser.add_argument("--model", required=True, metavar="FILE|NAME")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel size [1]")
    parser.add_argument("--seq", type=int, default=256, metavar="TOKENS", help="[256]")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="[fp32]")
    parser.add_argument("--threads", type=int, default=None, metavar="N",
                        help="threads per rank [cores / ep]")
    parser.add_argument("--cache", default=None, metavar="DIR", help="[~/.cache/bagualu]")
    parser.add_argument("--json", default=None, metavar="FILE|-",
                        help="also write the profile here; - = standard output")
    return parser


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(list(argv))
    for key in ("ep", "seq", "micro_batch_size", "threads"):
        value = getattr(args, key)
        if value is not None and value < 1:
            raise InvalidInput(WHERE, f"--{key.replace('_', '-')}", value, "at least 1")
    spec = resolve_model(args.model)
    if spec.experts % args.ep:
        raise InvalidInput(WHERE, "--ep", args.ep, f"a divisor of the {spec.experts} experts")
    if args.threads is None:
        args.threads = max(1, len(os.sched_getaffinity(0)) // args.ep)
    path = cache_file(spec, args, Path(args.cache) if args.cache else default_folder())
    check_folder(path.parent)  # before minutes of measuring
    check_file(args.json)
    code = launch.train(["--model", args.model, "--nproc", str(args.ep), "--ep", str(args.ep),
                         "--seq", str(args.seq), "--micro-batch-size", str(args.micro_batch_size),
                         "--dtype", args.dtype, "--threads", str(args.threads), "--quiet",
                         "--write-profile", str(path.absolute())])
    if code != EXIT_OK:
        return code
    text = path.read_text()
    row_bytes = spec.hidden * (2 if args.dtype == "bf16" else 4) + 4  # a row and its gate weight
    system = measure_this_machine(json.loads(text), args.threads, row_bytes)
    store_profile(path.parent / FILE_NAME, json.dumps(system, indent=2) + "\n")
    if args.json == "-":
        print(text)
    else:
        if args.json:
            store_profile(Path(args.json), text)
        print(json.dumps(json.loads(text), indent=1))
        print(f"kept in {path}, rates of the machine in {path.parent / FILE_NAME}",
              file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BagualuError as error:
        print(f"bagualu profile: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)
