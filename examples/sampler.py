"""Draw samples from a posterior by many Markov chains, and judge them in xarray.

::

    jobrunner run examples/sampler.py --checkpoint runs/sampler --keep-last 2
    jobrunner run examples/sampler.py --checkpoint runs/many --keep-last 2 --param chains=200
    python examples/sampler.py

The data are counts of two kinds of days, and the model a rate for each kind: Metropolis steps propose
new rates, and accept or keep. A chain is a node: its state is a blob, and all its draws are one array
on disk, to which each epoch adds fifty rows. Stop it whenever you like; the same command goes on
with the same random numbers, and comes to the same draws, bit for bit. While it runs, and afterwards,
`summarize` reads the draws of all chains, with no cluster, and says whether the chains agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Session,
    Task,
    current_task,
    epoch_limiter,
    job,
)

COUNTS = {"weekday": [3, 5, 4, 2, 4, 6, 3, 4], "weekend": [9, 7, 11, 8]}
DRAWS = 50
"""How many steps a chain makes in an epoch."""


def log_density(rates: Any) -> float:
    """Return the logarithm of the posterior density, but for a constant; the prior is exponential."""
    if min(rates) <= 0:
        return -np.inf
    density = -0.1 * float(rates.sum())
    for rate, counts in zip(rates, COUNTS.values(), strict=True):
        density += sum(counts) * float(np.log(rate)) - len(counts) * float(rate)
    return density


def start() -> Any:
    """Choose where a chain begins; each chain has random numbers of its own."""
    return current_task().rng.uniform(1, 20, size=len(COUNTS))


def walk(rates: Any) -> tuple[Any, Any]:
    """Make some steps; return the last state and all draws."""
    rng = current_task().rng
    draws = []
    for _ in range(DRAWS):
        proposal = rates + rng.normal(size=rates.size)
        if np.log(rng.random()) < log_density(proposal) - log_density(rates):
            rates = proposal
        draws.append(rates)
    return rates, np.array(draws)


@job
def build_job(chains: int = 8, epochs: int = 40) -> Job:
    """Define the job; nothing runs yet."""
    nodes = [f"chain:{i}" for i in range(chains)]
    with Job("sampler") as made:
        with made.init_group:
            Task.on_each(nodes, start, outputs="rates")
        Task.on_each(nodes, walk, "rates", ["rates", Blob("draws", history="extend")])
    epoch_limiter(made, epochs)
    return made


def summarize(manager: MultiNodeCheckpointManager) -> Any:
    """Return mean, deviation and R-hat of each rate, as an xarray Dataset."""
    import xarray  # only this function needs it

    samples = xarray.DataArray(
        manager.history_of("draws"), dims=("chain", "draw", "rate"), coords={"rate": list(COUNTS)}
    )
    samples = samples.isel(draw=slice(samples.sizes["draw"] // 2, None)).compute()  # warmed up
    within = samples.var("draw", ddof=1).mean("chain")
    between = samples.mean("draw").var("chain", ddof=1)
    return xarray.Dataset(
        {
            "mean": samples.mean(("chain", "draw")),
            "deviation": samples.std(("chain", "draw")),
            "r_hat": np.sqrt(1 + between / within),  # close to 1 if the chains agree
        }
    )


if __name__ == "__main__":
    manager = MultiNodeCheckpointManager("runs/sampler", keep=KeepLast(2))  # and all draws
    with Session.local(workers=2) as session:
        JobRunner(build_job(), manager).run(session)
    print(summarize(manager).to_dataframe().round(2))
