"""Stories of runs, as long and as odd as a test wants."""

import math
import random

from jobrunner.story import EpochStory, Ledger, LossStory, RunStory, Story

START = 1_750_000_000.0


def make_story(
    num_epochs=40,
    *,
    nodes=("server", "trainer:0", "trainer:1"),
    metrics=("loss", "accuracy"),
    num_runs=2,
    text="",
):
    """Runs that were lost and resumed, but for the last; `text` is in all of their texts."""
    random.seed(1)
    runs, each = [], num_epochs // num_runs
    for number in range(1, num_runs + 1):
        first = (number - 1) * each
        began = START + first * 2.0 + number * 3600
        at, epochs, losses = began + 4, [], []
        for epoch in range(first + 1, first + each + 1):
            if epoch % 13 == 7:
                losses.append(
                    LossStory(at, f"worker tcp://10.0.0.7:4567 is gone {text}", at + 3, epoch - 1)
                )
                at += 3
            at += 1.8
            is_aside = number < num_runs and epoch > first + each - 3
            values = {name: math.exp(-epoch / 20) + random.random() / 10 for name in metrics}
            epochs.append(EpochStory(epoch, at, 0.2, 5 << 20, values, not is_aside, is_aside))
            at += 0.2
        recovery = 3.0 * len(losses)
        ledger = Ledger(4, 1.8 * each, 0.15 * each, 0, recovery, 0.05 * each)
        is_last = number == num_runs
        runs.append(
            RunStory(
                number=number,
                name=f"run{number}{text}",
                host=f"host-1{text}",
                pid=4711,
                plan={
                    "job": f"kmeans{text}",
                    "parameters": {"lr": 0.1, f"text{text}": text},
                    "nodes": {node: ["w"] for node in nodes},
                },
                environment={
                    "python": "3.12.1",
                    "command": f"jobrunner run job.py{text}",
                    "placement": dict.fromkeys(nodes, f"tcp://10.0.0.1:1{text}"),
                },
                began=began,
                last_seen=at,
                state="finished" if is_last else "lost",
                stopped_by=("epoch_limiter",) if is_last else (),
                resumed_from=max(0, first - 3) if first else None,
                epochs=epochs,
                losses=tuple(losses),
                ledger=ledger,
            )
        )
    return Story(f"/data/runs/kmeans{text}", tuple(runs))
