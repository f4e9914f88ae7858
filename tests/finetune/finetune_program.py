"""A program that finetunes the tiny CLIP into folders: undisturbed, killed three times, starved of disk.

``finetune_program.py MODEL ROOT`` leaves a folder for each of the three and prints what became of its children. All in
one process, because starting one costs more than training the tiny CLIP.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # optimisers import it when they are made: once here instead of once in every child

import react_clip as rc
from react_clip.finetune import Settings, finetune

STEPS = 12
SETTINGS = Settings(
    steps=STEPS,
    batch=8,
    lr=1e-3,
    average=0.5,
    save_every=2,
    check_every=3,
    eps=4 / 255,
    eps_start=1 / 255,
    dtype="fp32",
)
Progress = Callable[[int, int, float], None]


def child(encoder: rc.Encoder, out: Path, progress: Progress | None = None) -> int:
    """Fork; the child trains and exits with 0, or with 2 where it was refused."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        pixels = torch.rand(24, 3, encoder.image_size, encoder.image_size, generator=torch.Generator().manual_seed(0))
        finetune(encoder, "fare", pixels, out=out, settings=SETTINGS, progress=progress)
        code = 0
    except rc.ReactClipError as error:
        print(f"{out.name} refused: {error}", flush=True)
        code = 2
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def slowly(done: int, total: int, loss: float) -> None:
    time.sleep(0.05)


def kill(encoder: rc.Encoder, out: Path, longest: float) -> None:
    """Kill a child at a random moment: while it starts, in a step, in a check, or while a checkpoint is written."""
    pid, moment = child(encoder, out, slowly), random.uniform(0, longest)
    time.sleep(moment)
    os.kill(pid, signal.SIGKILL)
    print(f"killed ended {exit_code(pid)} after {moment:.3f} s", flush=True)


def starve(done: int, total: int, loss: float) -> None:
    """From the fifth step on no file may grow beyond a few bytes: the log still can, a checkpoint cannot."""
    if done == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, root = rc.load(sys.argv[1], device="cpu"), Path(sys.argv[2])
    began = time.monotonic()
    print("plain ended", exit_code(child(model, root / "plain", slowly)), flush=True)
    longest = (time.monotonic() - began) / 4
    for _ in range(3):
        kill(model, root / "killed", longest)
    print("killed ended", exit_code(child(model, root / "killed")), flush=True)
    print("starved ended", exit_code(child(model, root / "starved", starve)), flush=True)
    print("starved left", *sorted(path.name for path in (root / "starved").iterdir()), flush=True)
    print("starved ended", exit_code(child(model, root / "starved")), flush=True)
