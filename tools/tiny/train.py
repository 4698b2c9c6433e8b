"""The training loop of one model: planned by time, in pieces that go on from one another."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g4tool.checkpoint.tiny import TINY
from g4tool.model.text import TextModel
from tiny import arrays, model
from tiny.arrays import Ids
from tiny.batches import SHARES, Batches, consecutive
from tiny.masters import Masters
from tiny.state import State, read_state, write_state

SEED = 0
LENGTH = 512
BALANCE_WEIGHT = 0.01
EASE_STEPS = 100
SAVE_SECONDS = 15.0
"""Kept free at the end of a piece for the last measurement and for writing."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """One piece of training. `piece` of `pieces`: the schedule runs on from where it stopped.

    `seconds` is wall time from the process's start; `steps`, if set, ends the piece instead.
    `batch` counts rows of LENGTH tokens; `warmup` is a share of the whole schedule.
    """

    seconds: float
    piece: int = 1
    pieces: int = 1
    steps: int | None = None
    batch: int = 64
    rate: float = 3e-3
    decay: float = 0.1
    drop: float = 0.1
    warmup: float = 0.02
    compiled: bool = True
    measure_seconds: float = 20.0


def train(name: str, plan: Plan, data: Path, out: Path, resume: Path | None, say: Say) -> None:
    """Trains the tiny model `name` on the packed corpus `data`; its state goes into folder `out`.

    The model computes in bfloat16, as it will when it is run. `resume` is the folder that the
    piece before wrote; raises G4Error when its files are not there.
    """
    began = time.monotonic()
    # Where attention falls back to plain matmuls in float32, they may use the tensor cores.
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = State() if resume is None else read_state(resume, name)
    network = model.make(TINY[name], plan.drop, SEED)
    if state.weights:
        network.load_state_dict({**network.state_dict(), **state.weights})
    values = {k: p.detach().clone().to(device) for k, p in network.named_parameters()}
    network.to(device=device, dtype=torch.bfloat16)
    masters = Masters(network, values, plan.decay)
    packed = arrays.load(data)
    chat = "chat-small" if network.config.per_layer_dim else "chat-large"
    feed = Batches(packed, chat, plan.batch, LENGTH, device)
    rows = measured_rows(packed, chat, device)
    generator = torch.Generator(device).manual_seed(SEED + plan.piece)
    torch.manual_seed(SEED + plan.piece)
    # Mode and shapes never change, so one graph serves the whole piece.
    objective = torch.compile(model.loss, fullgraph=True) if plan.compiled else model.loss
    first = objective(network, feed.next(generator), BALANCE_WEIGHT)[1]
    torch.autograd.backward(first)  # for its compilation; the gradients are not used
    network.zero_grad(set_to_none=True)
    clock = Clock(plan, began)
    say(f"ready after {clock.start - began:.0f} s, step {state.step}")

    total, count = torch.zeros((), device=device), 0
    before, seconds = state.step, state.seconds
    while (done := clock.done(state.step - before)) < 1:
        token_loss, minimised = objective(network, feed.next(generator), BALANCE_WEIGHT)
        torch.autograd.backward(minimised)
        # The optimizer starts empty in each piece, so its first steps are kept small.
        ease = min(1.0, (state.step - before + 1) / EASE_STEPS)
        masters.step(plan.rate * ease * schedule(clock.progress(done), plan.warmup))
        total += token_loss
        count += 1
        state.step += 1
        if clock.due():
            state.seconds = seconds + clock.elapsed()
            note(state, network, rows, float(total / count), say)
            total, count = torch.zeros_like(total), 0
            save(out, name, state, masters)
            clock.measured()
    state.seconds = seconds + clock.elapsed()
    rate = (state.step - before) * plan.batch * LENGTH / clock.elapsed()
    if count:
        note(state, network, rows, float(total / count), say)
        save(out, name, state, masters)
    say(f"{state.step - before} steps in this piece, {rate / 1e6:.3f} M tokens/s")


class Clock:
    """How far a piece has come, by time or by steps."""

    def __init__(self, plan: Plan, began: float) -> None:
        self.plan = plan
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.start = self.last = time.monotonic()
        self.end = began + plan.seconds - SAVE_SECONDS

    def done(self, steps: int) -> float:
        """The share of this piece that is over, 1 or more at its end."""
        if self.plan.steps is not None:
            return steps / self.plan.steps
        return self.elapsed() / max(self.end - self.start, 1e-9)

    def progress(self, done: float) -> float:
        """The share of the whole schedule."""
        return (self.plan.piece - 1 + done) / self.plan.pieces

    def elapsed(self) -> float:
        """Seconds since training began in this piece."""
        return time.monotonic() - self.start

    def due(self) -> bool:
        """Whether it is time to measure."""
        return time.monotonic() - self.last >= self.plan.measure_seconds

    def measured(self) -> None:
        """Says that it was done."""
        self.last = time.monotonic()


def schedule(progress: float, warmup: float) -> float:
    """Learning rate factor at `progress` in [0, 1]: a linear rise, then a cosine down to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def measured_rows(
    packed: Mapping[str, Ids], chat: str, device: torch.device
) -> dict[str, dict[str, Tensor]]:
    """Rows to measure with, by part ("dev", "held-out") and source; conversations in dev only."""
    parts = {
        part: {
            source: consecutive(packed[f"{part}/{source}"], LENGTH).to(device)
            for source in SHARES
            if source != "chat"
        }
        for part in ("dev", "held-out")
    }
    parts["dev"]["chat"] = consecutive(packed[f"dev/{chat}"], LENGTH).to(device)
    return parts


def note(
    state: State,
    network: TextModel,
    rows: Mapping[str, Mapping[str, Tensor]],
    train_loss: float,
    say: Say,
) -> None:
    """Measures, appends a record to the history, and keeps the weights if they are the best."""
    losses = {
        part: {source: float(model.row_losses(network, x).mean()) for source, x in found.items()}
        for part, found in rows.items()
    }
    dev = sum(SHARES[source] * loss for source, loss in losses["dev"].items())
    held_out = sum(losses["held-out"].values()) / len(losses["held-out"])
    record: dict[str, Any] = {
        "step": state.step,
        "seconds": round(state.seconds, 1),
        "train": round(train_loss, 4),
        "dev": round(dev, 4),
        "held_out": round(held_out, 4),
        "sources": {source: round(loss, 4) for source, loss in losses["held-out"].items()},
        "chat": round(losses["dev"]["chat"], 4),
    }
    shares = model.expert_shares(network, rows["dev"]["stories"])
    if shares:
        record["least_used_expert"] = round(min(min(layer) for layer in shares), 4)
    state.history.append(record)
    if dev < state.best:
        state.best, state.best_step = dev, state.step
        state.best_weights = {k: v.detach().clone() for k, v in network.state_dict().items()}
    say(f"step {state.step}: {record}")


def save(out: Path, name: str, state: State, masters: Masters) -> None:
    """Writes the state as it stands."""
    state.weights = dict(masters.values)
    write_state(out, name, state)
