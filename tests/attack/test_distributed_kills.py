"""Kill one of two training processes: the other soon ends with a message, and the same command resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from attack.arena import Arena, Run
from attack.commands import ATTACK_RECIPE, Command
from attack.faults import environment
from attack.tally import Round, Tally

KILLS = 10
MINUTE, TRAINING = 60.0, 300.0  # seconds: to end when one is lost, to train
LONG = ATTACK_RECIPE.replace("dense: {steps: 6", "dense: {steps: 100").replace(
    "checkpoint_every: 3", "checkpoint_every: 20"
)
SAME = 2e-3  # of the held-out NLL, relative: two processes add up in another order


@pytest.mark.parametrize("sharding", ["none", "fsdp"], ids=["ddp", "fsdp"])
def test_one_of_two_is_killed(
    sharding: str, arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    command = Command("train", ("train", "project/long.yaml", "--device", "cpu"))
    with attack(f"one of two processes, {'ddp' if sharding == 'none' else sharding}") as tally:
        start = arena.folder / "states" / f"torchrun-{sharding}"
        arena.reset("empty")
        (arena.ground / "project" / "long.yaml").write_text(f"{LONG}sharding: {sharding}\n")
        arena.ground.rename(start)
        arena.expected(command, start)
        expected = heldout_nll(arena.ground)
        for round_ in arena.rounds(tally, KILLS):
            round_.note("rounds")
            arena.reset(start)
            story = lose_one(round_, command)
            again = torchrun(arena, command)
            try:
                again.status = again.process and again.process.wait(TRAINING)
            except subprocess.TimeoutExpired:
                end(again)
                round_.fail("hung", f"{story}; resumed", again)
                continue
            round_.note("resumed")
            if again.status:
                round_.fail("not resumed", f"{story}; resumed", again)
            elif abs(heldout_nll(arena.ground) / expected - 1) > SAME:
                round_.fail(
                    "differed", f"{story}: NLL {heldout_nll(arena.ground)}, not {expected}", again
                )
            else:
                round_.note("same")


def torchrun(arena: Arena, command: Command) -> Run:
    """Start a command in two processes."""
    folder = arena.folder / "runs" / f"torchrun-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    script = str(Path(__file__).with_name("torchrun_main.py"))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *launcher, script, *command.arguments(arena.ground)],
            cwd=arena.ground,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            env=environment(),
        )
    return Run(process.pid, folder, process)


def lose_one(round_: Round, command: Command) -> str:
    """Kill one process in the middle of a training, and check how the other and torchrun end; return a description."""
    arena, rank = round_.arena, round_.random.randrange(2)
    delay = round_.random.uniform(0.0, 0.5)
    run = torchrun(arena, command)
    assert run.process is not None
    story = f"process {rank} killed {delay:.2f} s after the first checkpoint"
    limit = time.monotonic() + TRAINING
    while not list(arena.ground.glob("w/runs/tiny/*/checkpoint-*")) and run.process.poll() is None:
        if time.monotonic() > limit:
            end(run)
            round_.fail("hung", "no checkpoint was written", run)
            return story
        time.sleep(0.02)
    time.sleep(delay)
    workers = {
        int(p.environ()["RANK"]): p
        for p in psutil.Process(run.number).children()
        if "RANK" in p.environ()
    }
    if rank not in workers:
        round_.note("too late")
        end(run)
        return story
    workers[rank].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    round_.note("killed")
    try:
        run.status = run.process.wait(MINUTE)
        round_.note("ended")
        story = f"{story}, ended after {time.monotonic() - killed:.0f} s"
    except subprocess.TimeoutExpired:
        round_.fail("not ended within a minute", story, run)
    _, left = psutil.wait_procs(list(workers.values()), timeout=5)
    if left:
        round_.fail("processes left", story, run)
    end(run, *left)
    if run.status == 0:
        round_.fail("exit 0", story, run)
    if not run.err.strip():
        round_.fail("no message", story, run)
    return story


def end(run: Run, *others: psutil.Process) -> None:
    """End torchrun with the processes that it started, and any that it left."""
    assert run.process is not None
    if run.process.poll() is None:
        run.process.terminate()
        run.process.wait(MINUTE)
    for process in others:
        process.kill()


def heldout_nll(ground: Path) -> float:
    """Return the held-out NLL of the trained reference."""
    (record,) = ground.glob("w/runs/tiny/branches/sp-kv-*/final/run.json")
    return float(json.loads(record.read_text())["heldout_nll"])
