"""The command line: help, refusals, play. Whole jobs are in recipes/test_apex_job.py."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrl_dist.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from torchrl_dist.cli import (
    _check_shape,
    _delivered,
    _interrupt_behind,
    _print_result,
    _summary,
    _unsearched_imports,
    main,
)
from torchrl_dist.errors import ConfigurationError
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.catalog import RECIPES
from torchrl_dist.recipes.parts.networks import QNetwork
from torchrl_dist.recipes.training.options import flag, from_plain, read_options
from torchrl_dist.stopping import Stopped


def a_policy(path: Path, env: str = "CartPole-v1") -> Path:
    """A checkpoint whose policy balances the pole by hand-set weights."""
    network = QNetwork(4, 2, (2,))
    push = torch.tensor([0.1, 0.3, 3.0, 1.0])  # right if positive
    with torch.no_grad():
        network[0].weight.copy_(torch.stack([push, -push]))
        network[0].bias.zero_()
        network[2].weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        network[2].bias.zero_()
    info = {"env": env, "observation_size": 4, "num_actions": 2, "hidden": (2,)}
    return save_checkpoint(path, Checkpoint("apex", {}, network.state_dict(), policy_info=info))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which the command refuses these arguments."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("torchrl-dist: error: ")
    return captured.err


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("--env NoSuchEnv-v0", ["--env", "NoSuchEnv-v0"]),
        ("--env CartPol-v1", ["--env", "CartPol-v1", "did you mean CartPole-v1?"]),
        ("--env CartPole", ["--env", "'CartPole'", "use CartPole-v1"]),
        ("--total-frame 5 --fps 3", ["--fps", "train apex --help"]),
        ("--totl_frames 5", ["--totl_frames", "did you mean --total-frames?", "apex --help"]),
        ("--total_frames many", ["--total-frames", "many"]),
        ("--env Pendulum-v1", ["--env", "Box", "Discrete", "ddppo and sac"]),
        ("--env no:such:thing", ["--env"]),
        ("--total-frames -1", ["--total-frames", "-1", "at least 1"]),
        ("--total-frames many", ["--total-frames", "many"]),
        ("--collectors -2", ["--collectors", "-2", "at least 0"]),
        ("--gamma 1.5", ["--gamma", "1.5", "at most 1"]),
        ("--gamma 0", ["--gamma", "more than 0"]),
        ("--learning-rate nan", ["--learning-rate", "nan", "finite"]),
        ("--hidden 64 0", ["--hidden", "0"]),
        ("--hidden", ["--hidden"]),
        ("--capacity 100 --learning-starts 200", ["--learning-starts", "capacity"]),
        ("--seed -1", ["--seed", "-1"]),
        ("--device gpu", ["--device", "gpu", "auto, cpu or cuda"]),
        ("--config nowhere.yaml", ["--config", "nowhere.yaml"]),
        ("--no-such-option 1", ["--no-such-option"]),
        ("--output-dir /dev/null", ["--output-dir", "/dev/null"]),
        ("--output-dir runs/x --replay-dir /proc/no/where", ["--replay-dir", "/proc/no"]),
        ("gama: 0.9", ["gama", "gamma"]),
        ("gamma: 1e3", ["--gamma", "1000", "at most 1"]),
        ("gamma: [0.9]", ["--gamma"]),
        ("hidden: 64", ["--hidden"]),
        ("total_frames: many", ["--total-frames", "many"]),
        ("- gamma", ["mapping"]),
        ("{", ["cannot read"]),
        ("output_dir: 2024-13-45", ["cannot read", "month"]),
        ("gamma: 0.9\nseed: 1\ngamma: 0.8", ["'gamma' twice"]),
        ("total_frames: 2.5", ["--total-frames", "2.5"]),
        ("gamma: " + "9" * 400, ["--gamma", "at most 1"]),
        ("hidden: &a [*a]", ["--hidden", "a list in a list"]),
    ],
)
def test_an_error_in_arguments_or_a_configuration_file_gets_one_line_that_names_it(
    given: str,
    names: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(given)
    arguments = given.split() if given.startswith("--") else ["--config", "run.yaml"]
    line = refused(["train", "apex", *arguments], capsys)
    for name in names:
        assert name in line
    assert not list(Path().glob("runs/*/*"))


def test_a_wrong_command_gets_one_line_and_no_command_gets_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["fly"], ["train"], ["train", "ppo"], ["play"]):
        refused(arguments, capsys)
    assert "torchrl-dist play --help" in refused(["play", "x", "--episode-s", "3"], capsys)
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "train a recipe" in captured.err


def test_an_option_may_have_underscores_but_the_words_of_another_command_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train", "apex", "--print-config", "--output_dir=a_folder", "--total_frames", "77"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "output_dir: a_folder" in printed and "total_frames: 77" in printed
    line = refused(["train", "apex", "--print-config", "--frames", "3"], capsys)
    assert "did you mean --frames-per-batch?" in line or "unrecognized" in line
    assert main(["slurm", "--", "python", "train.py", "--my_option", "1"]) == 0
    assert "--my_option" in capsys.readouterr().out


def test_a_start_is_announced_before_the_imports_and_a_terminal_gets_a_summary(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "torchrl_dist", "train", "apex", "--total-frames", "256"]
    command += ["--collectors", "0", "--learning-starts", "100", "--eval-episodes", "1"]
    code = """
import sys
from torchrl_dist import cli
say = cli._say
def note(text):
    say(f"{text}; {'torch' in sys.modules}")
cli._say = note
cli.console()
"""
    refused = [sys.executable, "-c", code, "train", "apex", "--env", "CartPole"]
    done = subprocess.run(refused, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    first, second = done.stderr.splitlines()
    assert (
        first == "torchrl-dist: measuring how many processes pay off; False"
        and "use CartPole-v1" in second
    )
    assert not list(tmp_path.iterdir())
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, cwd=tmp_path) as run:
        os.close(theirs)
        _, said = run.communicate(timeout=100)
        printed = os.read(ours, 1 << 16).decode().splitlines()
        os.close(ours)
    assert run.returncode == 0, said
    assert said.startswith(b"torchrl-dist: starting 1 process\n")
    folder = "runs/apex-CartPole-v1-seed0"
    assert printed[0].startswith("apex on CartPole-v1, seed 0: 256 frames, ")
    assert printed[1].startswith("mean return ") and printed[1].endswith(", 1 fresh episode")
    assert printed[2] == f"play:   torchrl-dist play {folder}"
    again = f"--resume --output-dir {folder} --total-frames 512"
    assert printed[3] == f"resume: torchrl-dist train apex {again}"
    assert printed[4] == f"look:   tensorboard --logdir {folder}, or learning_curve.png in it"
    assert len(printed) == 5


def test_the_summary_of_a_stopped_run_and_of_a_launchers_run(monkeypatch, tmp_path: Path) -> None:
    result = {"mean_return": None, "mean_return_is_of": "", "stopped_by": "SIGINT"}
    result |= {"frames": 4000, "updates": 7, "seconds": 2.5}
    config = ApexConfig(output_dir="my runs/1").anchored()
    lines = _summary(result, config, 4).splitlines()
    assert lines[0].endswith("2 s, stopped by SIGINT") and lines[1] == "no evaluation yet"
    again = "start the ranks again, with --resume --output-dir 'my runs/1'"
    assert lines[3] == f"resume: {again}" and len(lines) == 5
    for program, shown in ((".venv/bin/torchrl-dist",) * 2, ("__main__.py", "torchrl-dist")):
        monkeypatch.setattr(sys, "argv", [program])
        monkeypatch.setenv("PATH", str(tmp_path))
        assert f"play:   {shown} play 'my runs/1'" in _summary(result, config, None)
    monkeypatch.chdir(tmp_path)
    assert str(config.output_path) in _summary(result, config, None)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"RANK": "1"}, ["rank 1", "WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ["rank 1", "Open MPI"]),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, ["rank 3", "task 3 of 4"]),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, ["rank 2", "SLURM", "srun"]),
    ],
)
def test_a_rank_that_refuses_prints_its_number(variables, names, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refused(["train", "apex"], capsys)
    assert all(name in line for name in names), line
    assert "rank" in refused(["train", "apex", "--config", "nowhere.yaml"], capsys)
    assert not list(tmp_path.iterdir())


def test_a_command_in_which_something_calls_exit_fails_with_a_message(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torchrl_dist.cli._inspect", lambda options: sys.exit(0))
    assert main(["inspect", "x"]) == 1
    assert "something called sys.exit(0)" in capsys.readouterr().err


def test_a_finished_command_waits_for_no_thread_of_others_and_needs_no_output() -> None:
    code = """
import atexit, sys, threading, time
from torchrl_dist import cli
def main():
    threading.Thread(target=lambda: time.sleep(60), name="of-a-user").start()
    print("printed", flush=True)
    return 7
cli.main, cli._END_S = main, 0.2
cli.console()
"""
    shell = ["bash", "-c"]
    for close in ("", ">&- 2>&-"):
        command = [*shell, f'exec "$0" -c "$1" {close}', sys.executable, code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 7, done
        assert close or (done.stdout == "printed\n" and "thread 'of-a-user' at" in done.stderr)
    refusal = [*shell, '"$0" -m torchrl_dist train apex --gamma 7 2>&-', sys.executable]
    done = subprocess.run(refusal, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_command_ends_with_its_code_while_a_thread_computes_in_torch(tmp_path: Path) -> None:
    """Python's finalization aborts the process where such a thread asks for the interpreter."""
    code = """
import atexit, sys, threading, time, torch
from torchrl_dist import cli
def compute():
    ones = torch.ones(64, 64)
    while True:
        torch.add(ones, ones)
def write():
    time.sleep(0.5)
    print("written by a normal thread", flush=True)
def main():
    atexit.register(lambda: print("failed:", hasattr(sys, "last_value"), flush=True))
    for _ in range(3):
        threading.Thread(target=compute, daemon=True).start()
    threading.Thread(target=write).start()
    if sys.argv[1] == "raise":
        raise ZeroDivisionError("of a command")
    return 5
cli.main = main
cli.console()
"""
    for how, status in (("return", 5), ("raise", 1)):
        command = [sys.executable, "-c", code, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done
        assert done.stdout == f"written by a normal thread\nfailed: {status == 1}\n"
        assert ("ZeroDivisionError: of a command" in done.stderr) == (status == 1)


def test_errors_that_are_each_others_context_do_not_count_as_an_interrupt() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    assert _interrupt_behind(first) is None


@pytest.mark.parametrize(
    ("interrupt", "code"), [(KeyboardInterrupt(), 130), (Stopped(128 + signal.SIGTERM), 143)]
)
@pytest.mark.parametrize("error", [RuntimeError("half-done"), ConfigurationError("half-done")])
def test_an_interrupt_stays_one_although_the_clean_up_fails(
    interrupt, code, error, capsys, monkeypatch
) -> None:
    def interrupted(options: object) -> None:
        try:
            raise interrupt
        finally:
            try:
                raise error
            except type(error) as first:
                raise type(error)("told otherwise") from first

    monkeypatch.setattr("torchrl_dist.cli._inspect", interrupted)
    assert main(["inspect", "x"]) == code
    monkeypatch.setattr("torchrl_dist.cli._parser", interrupted)  # while it imports modules
    assert main(["inspect", "x"]) == code
    assert "half-done" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "codes"),
    [
        (None, {0: 0, 129: 129}),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), {0: 141, 129: 129}),
        (OSError(errno.ENOSPC, "No space left on device"), {0: 1, 1: 1}),
    ],
)
def test_a_result_that_no_reader_got_is_a_failure(problem, codes, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torchrl_dist.runtime.outputs.problem_of", lambda stream: problem)
    assert {code: _delivered(code) for code in codes} == codes
    assert ("No space left" in capsys.readouterr().err) == (codes[0] == 1)


@pytest.mark.parametrize("size", ["60k", "100k"], ids=["first checkpoint", "later checkpoint"])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(size: str, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a small tmpfs")
    later = size == "100k"
    try:
        command = [sys.executable, "-m", "torchrl_dist", "train", "impala", "--collectors", "0"]
        command += ["--output-dir", str(disk / "run"), "--checkpoint-interval-s", "0.01"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        failed = [line for line in done.stderr.splitlines() if line.startswith("torchrl-dist: fai")]
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        (told,) = failed
        # a log, of which the folder is named, may be the first file without space
        what = "run(/checkpoint.pt)?" if later else "run/checkpoint.pt"
        assert re.search(f"{what} could not be written: No space left .* bytes free", told)
        assert ("continue with --resume" in told) == later
        assert (disk / "run").exists() == later
        if later:
            load_checkpoint(disk / "run" / "checkpoint.pt", recipe="impala")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_does_not_fit_the_command_is_refused_and_stays_unchanged(tmp_path, capsys):
    train = ["train", "apex", "--output-dir"]
    assert "there is no" in refused([*train, str(tmp_path / "run"), "--resume"], capsys)
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not empty" in refused([*train, str(tmp_path)], capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    config = ApexConfig(output_dir=str(tmp_path), hidden=(8,))
    save_checkpoint(config.checkpoint_path, Checkpoint("apex", config.as_plain(), {}))
    line = refused([*train, str(tmp_path), "--resume", "--hidden", "16"], capsys)
    assert "--hidden" in line and "cannot change" in line


def test_a_resumed_run_has_its_own_configuration_and_a_copied_run_stays_in_the_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ApexConfig(output_dir="original", hidden=(8,), n_steps=3)
    copy = ApexConfig().checkpoint_path  # in the default folder
    for path in (config.checkpoint_path, copy):
        save_checkpoint(path, Checkpoint("apex", config.as_plain(), {}))
    asked = ["train", "apex", "--resume", "--print-config", "--learning-rate", "1e-5"]
    for words, folder in (["--output-dir", "original"], "original"), ([], str(copy.parent)):
        assert main([*asked, *words]) == 0
        Path("printed.yaml").write_text(capsys.readouterr().out)
        found = ApexConfig(**read_options("printed.yaml", ApexConfig))
        assert found == dataclasses.replace(config, output_dir=folder, learning_rate=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_after_imports_as_before_them(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), _unsearched_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("recipe", ["ddppo", "apex"])
def test_a_resumed_job_of_a_launcher_has_the_shape_that_its_ranks_were_given(recipe: str) -> None:
    kind = RECIPES[recipe].config
    shape = {"collectors": 1} if recipe == "ddppo" else {"learners": 2}
    saved, here = kind(**shape), kind(output_dir="here")
    with pytest.raises(ConfigurationError, match=f"--{next(iter(shape))} .*every rank"):
        _check_shape(saved, here, 4)
    _check_shape(saved, kind(**shape, seed=3), 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_names_every_field_of_the_configuration(recipe: str, capsys) -> None:
    assert main(["train", recipe, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(RECIPES[recipe].config):
        assert flag(field.name) in text
    assert f"(default: {RECIPES[recipe].config().env})" in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_printed_configuration_can_be_read_back(recipe: str, tmp_path, capsys) -> None:
    wanted = ["--seed", "3", "--hidden", "8", "4", "--learning-rate", "1e-3"]
    assert main(["train", recipe, *wanted, "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(printed)
    given = ["train", recipe, "--config", str(tmp_path / "run.yaml")]
    assert main([*given, "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert main([*given, "--print-config", "--seed", "5"]) == 0
    assert capsys.readouterr().out == printed.replace("seed: 3", "seed: 5")


def test_a_configuration_comes_from_a_plain_file_or_from_a_pipe_that_the_shell_has_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")  # nothing ever writes to it
    line = refused(["train", "apex", "--config", str(tmp_path / "pipe")], capsys)
    assert f"{tmp_path / 'pipe'} is not a plain file" in line
    end, write = os.pipe()
    os.write(write, b"seed: 7")
    os.close(write)
    try:
        assert read_options(f"/dev/fd/{end}", ApexConfig) == {"seed": 7}
    finally:
        os.close(end)


def test_yaml_reads_numbers_as_the_command_line_does(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 5e-4\ntotal_frames: 2e5\nhidden: [8, 4]\n")
    read = read_options(path, ApexConfig)
    assert read == {"learning_rate": 5e-4, "total_frames": 200_000, "hidden": (8, 4)}
    path.write_text("total_frames: 2.0e+5")  # to YAML a number, but not an integer
    assert ApexConfig(**read_options(path, ApexConfig)).total_frames == 200_000


def test_the_last_line_is_json_whatever_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    _print_result({"mean_return": float("nan"), "returns": (1.0, float("inf"))})
    line = capsys.readouterr().out
    assert "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {"mean_return": None, "returns": [1.0, None]}


def test_help_and_refusals_do_not_wait_for_torch_and_play_starts_nothing_distributed(tmp_path):
    path = a_policy(tmp_path / "checkpoint.pt")
    script = f"""
import sys
from torchrl_dist.cli import main
assert main(["--help"]) == 0
assert main(["train", "apex", "--help"]) == 0
assert main(["train", "apex", "--gamma", "7"]) == 2
assert "torch" not in sys.modules
assert main(["play", {str(path)!r}, "--episodes", "1"]) == 0
heavy = {{"torchrl", "tensordict", "matplotlib", "torchrl_dist.runtime"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_configuration_survives_a_checkpoint() -> None:
    config = ApexConfig(hidden=(8, 4), seed=3, replay_dir="/dev/shm/x")
    assert from_plain(ApexConfig, config.as_plain()) == config
    as_lists = {**config.as_plain(), "hidden": [8, 4], "retired_field": 1}
    assert from_plain(ApexConfig, as_lists) == config


def test_play_gets_the_best_return_with_a_perfect_policy(tmp_path, capsys) -> None:
    path = a_policy(tmp_path / "checkpoint.pt")
    assert main(["play", str(tmp_path), "--episodes", "3", "--seed", "5"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["returns"] == [500.0] * 3 and result["mean_return"] == 500.0
    assert result["checkpoint"] == str(path)


def test_play_refuses_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refused(["play", str(tmp_path / "none.pt")], capsys)
    (tmp_path / "text.pt").write_text("hello")
    assert "damaged" in refused(["play", str(tmp_path / "text.pt")], capsys)
    path = a_policy(tmp_path / "gone.pt", env="Gone-v0")
    assert "Gone" in refused(["play", str(path)], capsys)
    good = a_policy(tmp_path / "good.pt")
    assert "--episodes" in refused(["play", str(good), "--episodes", "0"], capsys)
    assert "--seed" in refused(["play", str(good), "--seed", "-1"], capsys)


def test_play_writes_a_video(tmp_path, capsys, monkeypatch) -> None:
    import imageio_ffmpeg

    path = a_policy(tmp_path / "checkpoint.pt")
    arguments = ["play", str(path), "--episodes", "1", "--video", str(tmp_path / "film.mp4")]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["returns"] == [500.0]
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "film.mp4"))
    assert frames == 500
    wrong = ["play", str(path), "--episodes", "1", "--video", str(tmp_path / "none" / "film.mp4")]
    assert "--video" in refused(wrong, capsys)
    assert "one of them" in refused([*arguments, "--render"], capsys)
    film = (tmp_path / "film.mp4").read_bytes()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pygame", None)  # not installed
        assert "cannot be played here" in refused(arguments, capsys)
    assert (tmp_path / "film.mp4").read_bytes() == film
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "film.mp4"}
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "torchrl-dist[video]" in refused(arguments, capsys)


def test_a_plot_replaces_pictures_only(tmp_path: Path) -> None:
    from torchrl_dist.bench.command import check_folders

    (tmp_path / "notes.png").write_text("mine")
    (tmp_path / "old.png").write_bytes(b"\x89PNG\r\n\x1a\n...")
    (tmp_path / "empty.png").touch()
    with pytest.raises(ConfigurationError, match="exists and is not an image"):
        check_folders(None, tmp_path / "notes.png")
    for name in ("old.png", "empty.png", "new.png"):
        check_folders(tmp_path / "notes.png", tmp_path / name)  # lines are appended
    with pytest.raises(ConfigurationError, match="there is no folder"):
        check_folders(tmp_path / "none" / "a.jsonl")


def test_a_closed_stdout_ends_a_command_quietly_but_no_other_pipe_does() -> None:
    command = [sys.executable, "-m", "torchrl_dist", "slurm", "--", "train", "apex"]
    for close_early in (True, False):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            if close_early:
                process.stdout.close()
            _, errors = process.communicate(timeout=60)
        assert process.returncode == (141 if close_early else 0) and not errors, errors
    code = """
from torchrl_dist import cli
def main(): raise BrokenPipeError("of a worker")
cli.main = main
cli.console()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "BrokenPipeError: of a worker" in done.stderr
