"""Ignite's DeterministicEngine, which builds the loader once more, and resumes in the middle of an epoch."""

from __future__ import annotations

from typing import Any

from ignite.engine import DeterministicEngine, Events

from tests.frameworks.material import Points, compared, descend, facts_of, model, options, outline, tell

EPOCHS = 2
STOP_AFTER = 8  # of twelve: in the middle of the second epoch


class Run:
    """An engine and what it saw."""

    def __init__(self, dataset: Points, loader: Any, extras: dict[str, Any]) -> None:
        self.network = model()
        self.losses: list[float] = []
        self.outlines: list[Any] = []
        self.loader = loader(dataset, shuffle=True, **options(**extras))
        self.engine = DeterministicEngine(self.step)

    def step(self, _: Any, batch: Any) -> float:
        """Train on a batch."""
        self.losses.append(descend(self.network, *batch))
        self.outlines.append(outline(batch))
        return self.losses[-1]

    def state(self) -> dict[str, Any]:
        """What a checkpoint would hold."""
        return {
            "engine": self.engine.state_dict(),
            "network": {name: value.clone() for name, value in self.network.state_dict().items()},
        }


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """A whole run, and one that goes on from a checkpoint of it."""
    whole = Run(Points(), loader, extras)
    saved: dict[str, Any] = {}
    used: dict[str, Any] = {}
    whole.engine.add_event_handler(Events.ITERATION_COMPLETED(once=STOP_AFTER), lambda _: saved.update(whole.state()))
    whole.engine.add_event_handler(
        Events.EPOCH_COMPLETED(once=EPOCHS), lambda engine: used.update(facts_of(engine.state.dataloader))
    )
    whole.engine.run(whole.loader, max_epochs=EPOCHS)

    rest = Run(Points(), loader, extras)
    rest.network.load_state_dict(saved["network"])
    rest.engine.load_state_dict(saved["engine"])
    rest.engine.run(rest.loader, max_epochs=EPOCHS)
    return {"whole": whole.losses, "rest": rest.losses, "outlines": whole.outlines + rest.outlines, "loader": used}


if __name__ == "__main__":
    noisy = compared(job)  # with draws in the workers, which no loader can pick up in the middle
    tell({"noisy": noisy, "plain": compared(job, noise=False), "automatic": compared(job, automatic=True)})
