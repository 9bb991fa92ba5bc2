"""Bad input: a clear message, exit code 2, nothing half-written. One table row per case."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import SMALL, environment, run, write_model, write_text

from bagualu import launch
from bagualu.errors import InvalidInput
from bagualu.json_file import write_atomic
from bagualu.run_log import RunLog
from bagualu.train_args import parse, parse_spike
from bagualu.units import format_bytes, parse_bytes

# flags in place of or besides the good ones, and what the message must name
FLAG_CASES = [
    (["--budget", "0"], "--budget", "'0'"),
    (["--budget", "-5MiB"], "--budget", None),
    (["--budget", "96MoB"], "--budget", "96MoB"),
    (["--budget", "1e400"], "--budget", "1e400"),
    (["--host-budget", "lots"], "--host-budget", "lots"),
    (["--policy", "greedy"], "--policy", "save-all, full-recompute"),
    (["--steps", "0"], "--steps", "'0'"),
    (["--lr", "nan"], "--lr", "nan"),
    (["--beta1", "1"], "--beta1", "'1'"),
    (["--dropout", "1.0"], "--dropout", "1.0"),
    (["--dtype", "fp16"], "--dtype", "fp32, bf16"),
    (["--nproc", "4", "--ep", "3"], "--ep", "4 ranks"),
    (["--nproc", "3", "--ep", "3"], "--ep", "4 experts"),
    (["--unknown", "1"], "flags", "--unknown"),
    (["--step", "3"], "flags", "--step"),  # no abbreviations
    (["--hf", "x"], "--hf", "one of the two"),
    (["--plan", "p.json"], "--plan", "--policy static"),
    (["--recompute-modules", "core_attn"], "--recompute-modules", "selective"),
    (["--resume", "latest"], "--resume", "--checkpoint"),
    (["--checkpoint-every", "5"], "--checkpoint-every", "--checkpoint DIR"),
    (["--spike", "step=40"], "--spike", "layers"),
    (["--spike", "step=1,layers=7,factor=1"], "--spike", "MoE layers: 0, 1"),
    (["--spike", "step=1,layers=0,factor=0.5"], "--spike", "0.5"),
    (["--spike", "step=1,layers=0,factor=2"], "--spike", "at most 1 (--ep)"),
    (["--data", "/no/such/text"], "/no/such/text", "No such file"),
    (["--log", "/no/such/folder/a.jsonl"], "/no/such/folder/a.jsonl", "No such file"),
    (["--json", "/proc/nope.json"], "/proc/nope.json", "file"),
    (["--checkpoint", "/proc/nope"], "/proc/nope", "can be written"),
    (["--profile", "/no/profile.json"], "/no/profile.json", "No such file"),
    (["--routing-trace", "/no/trace.csv"], "/no/trace.csv", "No such file"),
    (["--resume", "/no/checkpoint"], "/no/checkpoint", "state.json"),
    (["--rdzv-endpoint", "nowhere:port", "--nproc", "2"], "--rdzv-endpoint", "HOST[:PORT]"),
    (["--master-port", "1.5"], "--master-port", "1.5"),
    (["--seed", "1" * 5000], "--seed", "an integer from"),
    (["--budget", "1" * 5000], "--budget", "a size above 0"),
    (["--budget", "\u0661MiB"], "--budget", "a size above 0"),  # a digit, but not of ASCII
    (["--threads", "4096"], "--threads", "on this machine"),
    (["--log", "n" * 300], "n" * 300, "too long"),
    (["--json", "n" * 300], "n" * 300, "too long"),
    (["--checkpoint", "n" * 300], "n" * 300, "too long"),
    (["--resume", "n" * 300], "n" * 300, "too long"),
    (["--data", "n" * 300], "n" * 300, "too long"),
]


@pytest.mark.parametrize("flags, field, named", FLAG_CASES, ids=lambda x: " ".join(x) if
                         isinstance(x, list) else "")
def test_bad_flags(tmp_path, capfd, flags, field, named):
    files = {write_model(tmp_path), write_text(tmp_path)}
    argv = ["train", "--model", str(tmp_path / "model.json"), *SMALL]
    if "--data" not in flags:
        argv += ["--data", str(tmp_path / "text.txt")]
    assert launch.main(argv + flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert field in err and (named or "") in err
    assert set(tmp_path.iterdir()) == files


MODEL_CASES = [
    ({"top_k": 5}, "top_k"), ({"experts": 0}, "experts"), ({"hidden": 17}, "hidden"),
    ({"heads": 3, "kv_heads": 2}, "heads"), ({"colour": "red"}, "colour"),
    ({"vocab": 100}, "vocab"), ({"layers": "two"}, "layers"), ({"layers": True}, "layers"),
    ({"dense_layers": [0]}, "dense_ffn"), ({"dense_layers": [0, 1]}, "dense_layers"),
    ({"dense_layers": [9]}, "dense_layers"), ({"family": "gpt"}, "family"),
    ({"family": "mixtral", "qk_norm": True}, "family"), ({"rms_eps": 0}, "rms_eps"),
    ({"version": 7}, "version"), ({"model_type": "llama"}, "model_type"),
]


@pytest.mark.parametrize("changes, field", MODEL_CASES)
def test_bad_model(tmp_path, capfd, changes, field):
    path = write_model(tmp_path, **changes)
    assert launch.main(["train", "--model", str(path), "--steps", "1"]) == 2
    err = capfd.readouterr().err
    assert str(path) in err and field in err


@pytest.mark.parametrize("text, named", [
    ("", "line 1"), ("{", "line 1, column"), ('{"layers": 2', "line 1"), ("[1]", "an object"),
    ("\xff\xfe", "UTF-8"), ("[" * 100000, "nesting"), ('{"layers": ' + "1" * 5000 + "}", "digits")])
def test_corrupt_model_file(tmp_path, capfd, text, named):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    assert launch.main(["train", "--model", str(path)]) == 2
    err = capfd.readouterr().err
    assert str(path) in err and named in err


@pytest.mark.parametrize("size", [0, 5, 16])
def test_data_too_short(tmp_path, capfd, size):
    # SMALL has sequences of 16 tokens, so one needs 17 bytes
    text = write_text(tmp_path, size=size)
    argv = ["train", "--model", str(write_model(tmp_path)), "--data", str(text)] + SMALL
    assert launch.main(argv) == 2
    assert str(text) in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["--data", "--model", "--plan", "--profile", "--routing-trace",
                                  "--log"])
def test_pipes_do_not_hang(tmp_path, capfd, flag):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    argv = ["train", *SMALL, "--policy", "static", flag, str(pipe)]
    if flag != "--model":
        argv += ["--model", str(write_model(tmp_path))]
    if flag != "--data":
        argv += ["--data", str(write_text(tmp_path))]
    assert launch.main(argv) == 2
    err = capfd.readouterr().err
    assert str(pipe) in err and "a pipe" in err


def test_report_of_a_pipe_does_not_hang(tmp_path, capfd):
    from bagualu import report
    os.mkfifo(tmp_path / "pipe")
    assert report.main([str(tmp_path / "pipe")]) == 2
    assert "a pipe" in capfd.readouterr().err


@pytest.mark.parametrize("name, text, named", [
    ("t.csv", "r,0,0,0," + "1 " * 100000, "field larger"),
    ("t.jsonl", "[" * 100000, "line 1"),
    ("t.jsonl", '{"step": ' + "1" * 5000 + "}", "line 1")])
def test_hostile_trace(tmp_path, capfd, name, text, named):
    path = tmp_path / name
    path.write_text(text)
    argv = ["train", "--model", str(write_model(tmp_path)), "--data", str(write_text(tmp_path)),
            "--routing-trace", str(path), *SMALL]
    assert launch.main(argv) == 2
    err = capfd.readouterr().err
    assert str(path) in err and named in err


@pytest.mark.parametrize("flag, text", [("--log", "log"), ("--checkpoint", "ck")])
def test_one_run_at_a_time(tmp_path, capfd, flag, text):
    place = tmp_path / text
    place.write_text("old\n") if flag == "--log" else place.mkdir()
    held = os.open(place, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    argv = ["train", "--model", str(write_model(tmp_path)), "--data", str(write_text(tmp_path)),
            flag, str(place), *SMALL]
    assert launch.main(argv) == 2
    os.close(held)
    err = capfd.readouterr().err
    assert str(place) in err and "in use by another run" in err
    assert place.is_dir() or place.read_text() == "old\n"


def test_devices_are_written_and_not_replaced(tmp_path):
    # through links of our own: a mistake here must not replace a device of the machine
    for name in ("null", "full"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    write_atomic(tmp_path / "null", b"x")
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "full", b"x")
    assert all((tmp_path / name).is_char_device() for name in ("null", "full"))
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "link").symlink_to("a")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("flag", ["--log", "--json"])
def test_disk_full_in_a_run(tmp_path, flag):
    (tmp_path / "full").symlink_to("/dev/full")
    done = run("train", "--model", write_model(tmp_path), "--data", write_text(tmp_path), *SMALL,
               "--steps", "1", flag, tmp_path / "full")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"full: {flag.strip('-')}" in done.stderr.replace("--json", "json")
    assert "No space" in done.stderr


def test_log_on_a_full_disk_keeps_whole_records(tmp_path):
    path = tmp_path / "log"
    log = RunLog(path, {}, 0)
    before, whole = resource.getrlimit(resource.RLIMIT_FSIZE), path.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(InvalidInput, match="log"):
            log.write("step", text="x" * 8192)
        log.write("summary")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.close()
    assert path.read_bytes() == whole


def test_unknown_model_lists_names(capfd):
    assert launch.main(["train", "--model", "nonesuch"]) == 2
    assert "demo" in capfd.readouterr().err


def test_unwritable_log_folder(tmp_path, capfd):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; /proc and missing folders are in the table")
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    argv = ["train", "--model", str(write_model(tmp_path)), "--log", str(folder / "a.jsonl")]
    assert launch.main(argv) == 2
    assert str(folder) in capfd.readouterr().err


def test_missing_model_flag(capfd):
    assert launch.main(["train"]) == 2
    assert "--model" in capfd.readouterr().err


def test_unknown_command(capfd):
    assert launch.main(["fly"]) == 2
    assert "train, profile, generate" in capfd.readouterr().err


def test_world_that_does_not_match_layout(tmp_path):
    done = run("--model", write_model(tmp_path), "--nproc", "4", module="bagualu.train")
    assert done.returncode == 2 and "--nproc" in done.stderr


def test_launcher_checks_without_torch(tmp_path):
    code = ("import sys; from bagualu import launch; "
            f"code = launch.main(['train', '--model', {str(write_model(tmp_path))!r}, "
            f"'--data', {str(write_text(tmp_path))!r}, '--log', '/no/such/x', '--nproc', '2']); "
            "sys.exit(99 if 'torch' in sys.modules else code)")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 2


def test_bytes_read_and_shown():
    assert parse_bytes("96MiB", "w", "f") == 96 * 2**20
    assert parse_bytes("1.5 GiB", "w", "f") == 3 * 2**29
    assert parse_bytes("64KB", "w", "f") == 64000
    assert parse_bytes("123", "w", "f") == 123
    assert [format_bytes(n) for n in (512, 96 * 2**20)] == ["512 B", "96.0 MiB"]
    for text in ("", "MiB", "1.MiB", "0.1", "99999999TiB", "1 2", "0x10"):
        with pytest.raises(InvalidInput):
            parse_bytes(text, "w", "f")


def test_spike_spans():
    spike = parse_spike("step=40-41,layers=2-3,factor=2.6")
    assert (spike.first_step, spike.last_step, spike.layers, spike.factor) == (40, 41, (2, 3), 2.6)
    assert [s for s in range(100) if spike.active(s)] == [40, 41]
    again = parse_spike("step=40-41,layers=2-3,factor=2.6,every=25")
    assert [s for s in range(100) if again.active(s)] == [40, 41, 65, 66, 90, 91]
    for bad in ("every=1", "every=x", "every=0", "often=25", "every=25,every=25"):
        with pytest.raises(InvalidInput, match="every=N"):
            parse_spike(f"step=40-41,layers=2-3,factor=2.6,{bad}")


def test_help_states_units_and_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "MiB" in text and "[256]" in text and "--routing-trace" in text


def test_model_files_of_the_tree_are_read():
    from bagualu.model_spec import model_from_file
    folder = Path(__file__).resolve().parents[2] / "configs" / "models"
    for path in sorted(folder.glob("*.json")):
        family = json.loads(path.read_text()).get("family", "native")
        if family not in ("native", "mixtral", "qwen3_moe"):
            with pytest.raises(InvalidInput, match="such models are planned for"):
                model_from_file(path)
            continue
        spec = model_from_file(path)
        assert spec.layers > 0 and json.loads(spec.to_json())["version"] == 1
