"""Train a classifier of handwritten digits on several nodes, data-parallel.

::

    jobrunner run examples/train_digits.py --checkpoint runs/digits --save-every 10steps
    jobrunner run examples/train_digits.py --checkpoint runs/slow --param lr=0.02
    jobrunner run examples/train_digits.py --checkpoint runs/long --param epochs=100 \
        --callback stop_early --keep-best accuracy:max
    python examples/train_digits.py

Each trainer has a copy of the network and reads a shard of the images, another shuffle in each
epoch. In a step every trainer computes the gradients of one batch; they are added in a tree, and all
copies are updated by their mean. After each epoch the network is validated on images it has not seen;
once it gets no better, the run ends, and the checkpoint with the best weights is still there. Stop it
whenever you like; the same command resumes from the last save, within an epoch too, and comes to the
same weights, bit for bit. It uses PyTorch; if that is not installed, a linear model in NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    KeepBest,
    Mean,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
    job,
    seeded,
)
from jobrunner.callbacks import EarlyStopping
from jobrunner.data import Reader, from_records

TRAINING = 1536
"""How many of the 1,797 images are for training; the others are for validation."""


def load() -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the images, (count, 64), and labels: for training and for validation."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    parts = slice(TRAINING), slice(TRAINING, None)
    training, validation = ({"images": images[part], "labels": labels[part]} for part in parts)
    return training, validation


def make_reader(i: int, trainers: int, batch: int) -> Reader:
    """Make the reader of a trainer's shard; a checkpoint has its position."""
    return from_records(load()[0]).shuffled(seed=1).sharded(i, trainers).batched(batch)


try:
    import torch

    @seeded  # tasks of one process take turns here, so that they do not mix their random numbers
    def make_network() -> Any:
        """Make a network of one hidden layer, the same on all trainers."""
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def make_optimizer(network: Any, lr: float) -> Any:
        """Make an optimizer, which has a state of its own."""
        return torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9)

    def compute_gradients(network: Any, images: Any, labels: Any) -> tuple[float, list[Any]]:
        """Return the loss of a batch, and its gradients."""
        network.zero_grad()
        output = network(torch.from_numpy(images))
        loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(labels))
        loss.backward()
        return loss.item(), [parameter.grad for parameter in network.parameters()]

    def apply_gradients(network: Any, optimizer: Any, gradients: list[Any]) -> None:
        """Change the network by one step of the optimizer."""
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    def predict(network: Any, images: Any) -> Any:
        """Return the digits that the network sees."""
        with torch.no_grad():
            return network(torch.from_numpy(images)).argmax(dim=1).numpy()

except ImportError:

    def make_network() -> Any:
        """Make the weights of a linear model, with a row for the bias."""
        return np.zeros((65, 10), "float32")

    def make_optimizer(network: Any, lr: float) -> Any:
        """Make the state of gradient descent with momentum."""
        return {"lr": lr, "velocity": np.zeros_like(network)}

    def compute_gradients(network: Any, images: Any, labels: Any) -> tuple[float, list[Any]]:
        """Return the loss of a batch, and its gradients."""
        scores = np.exp(images @ network[:-1] + network[-1])
        shares = scores / scores.sum(axis=1, keepdims=True)
        loss = float(-np.log(shares[np.arange(len(labels)), labels]).mean())
        errors = (shares - np.eye(10, dtype="float32")[labels]) / len(labels)
        return loss, [np.vstack([images.T @ errors, errors.sum(axis=0)])]

    def apply_gradients(network: Any, optimizer: Any, gradients: list[Any]) -> None:
        """Change the weights by one step."""
        optimizer["velocity"] = 0.9 * optimizer["velocity"] + gradients[0]
        network -= optimizer["lr"] * optimizer["velocity"]

    def predict(network: Any, images: Any) -> Any:
        """Return the digits that the model sees."""
        return (images @ network[:-1] + network[-1]).argmax(axis=1)


def compute(network: Any, reader: Any) -> list[Any]:
    """Read a batch, and return its gradients."""
    batch = next(iter(reader))
    loss, gradients = compute_gradients(network, batch["images"], batch["labels"])
    current_task().report(loss=Mean(loss))
    return gradients


def add(a: list[Any], b: list[Any]) -> list[Any]:
    """Add the gradients of two trainers, or of two groups of them."""
    return [left + right for left, right in zip(a, b, strict=True)]


def add_in_pairs(tasks: list[Task]) -> Task:
    """Define the tasks that add what `tasks` return; the last of them has the sum.

    In a tree, where no node gets more than two values at a time. If every trainer had the gradients
    of all as an input, n lists of n gradients would be sent. What is added to what does not depend
    on timing, so neither do the bits.
    """
    while len(tasks) > 1:
        pairs = zip(tasks[::2], tasks[1::2], strict=False)
        sums = [Task(add, [a.output(), b.output()], node=a.node) for a, b in pairs]
        tasks = sums + tasks[2 * len(sums) :]
    return tasks[0]


def update(network: Any, optimizer: Any, total: list[Any], trainers: int) -> None:
    """Apply the mean of all trainers' gradients."""
    apply_gradients(network, optimizer, [gradient / trainers for gradient in total])


def validate(network: Any) -> None:
    """Report the share of digits that the network tells right."""
    validation = load()[1]
    right = predict(network, validation["images"]) == validation["labels"]
    current_task().report(accuracy=float(right.mean()))


@job
def build_job(trainers: int = 4, batch: int = 32, epochs: int = 10, lr: float = 0.1) -> Job:
    """Define the job; nothing runs yet."""
    steps, rest = divmod(TRAINING, trainers * batch)
    if rest:
        raise ValueError(f"trainers x batch must divide {TRAINING}, got {trainers} x {batch}")
    nodes = [Node(f"trainer:{i}") for i in range(trainers)]
    with Job("digits", steps_per_epoch=steps) as made:
        with made.init_group:
            Task.on_each(
                nodes,
                make_reader,
                outputs="reader",
                kwargs=lambda i: {"i": i, "trainers": trainers, "batch": batch},
            )
            Task.on_each(nodes, make_network, outputs=Blob("network", replicated=True))
            Task.on_each(nodes, make_optimizer, outputs="optimizer", kwargs={"lr": lr})
        parts = Task.on_each(nodes, compute, inputs=["network"], updates="reader")
        Task.on_each(
            nodes,
            update,
            inputs={"total": add_in_pairs(parts).output()},
            updates=["network", "optimizer"],
            kwargs={"trainers": trainers},
        )
        with made.epoch_end_group:
            Task(validate, node=nodes[0])
    epoch_limiter(made, epochs)
    return made


def stop_early() -> EarlyStopping:
    """End the run when the network has not become better for three epochs."""
    return EarlyStopping("accuracy", patience=3, mode="max")


if __name__ == "__main__":
    keep = KeepBest("accuracy", mode="max")
    manager = MultiNodeCheckpointManager("runs/digits", save=SaveEvery(steps=10), keep=keep)
    with Session.local(workers=2) as session:
        JobRunner(build_job(epochs=100), manager, callbacks=[stop_early()]).run(session)
    best = manager.record(manager.best("accuracy", "max"))
    print(f"best after epoch {best.epoch}: accuracy {best.details.metrics['accuracy']:.3f}")
