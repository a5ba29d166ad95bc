"""Layers are computed while later ones are still on their way: timestamps, and a plot of them.

    PYTHONPATH=.:examples python tests/integration/vllm_engines/overlap.py --plot overlap.png

Prefill is stopped most of the time, which slows its sending down.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engines import Engine, Launch

LAYERS, TOKENS = 8, 1900


@dataclass
class Timeline:
    """Seconds since the step began, by layer: landed, asked for by attention, computed."""

    landed: list[float]
    asked: list[float]
    computed: list[float]

    def table(self) -> str:
        """One line for each layer."""
        lines = ["layer   asked for  landed  computed   (ms after the step has begun)"]
        for number, row in enumerate(zip(self.asked, self.landed, self.computed, strict=True)):
            lines.append(f"{number:5}{row[0] * 1e3:12.1f}{row[1] * 1e3:8.1f}{row[2] * 1e3:10.1f}")
        return "\n".join(lines)


def measure(load: str, directory: Path) -> Timeline:
    """One request, pulled slowly over TCP by a decode engine that loads in this way."""
    from tiny_llama import VOCABULARY, make_model

    model = str(make_model(directory / "model", layers=LAYERS, heads=8))
    tcp = {"UCX_TLS": "tcp,self"}
    prefill = Engine(Launch(model, "kv_producer", environment=tcp), directory / "prefill.log")
    launch = Launch(
        model,
        "kv_consumer",
        {"load": load},
        environment=tcp,
        connector="TracingConnector",
        module="tracing",
    )
    decode = Engine(launch, directory / "decode.log")
    try:
        prefill.ready()
        decode.ready()
        random = np.random.default_rng(1)
        # The first makes the link, and shows that all is well.
        for number, tokens in enumerate((100, TOKENS)):
            name = f"request {number}"
            prompt = random.integers(3, VOCABULARY, tokens).tolist()
            prefill.add(name, prompt, 1, {"do_remote_decode": True})
            answer = prefill.answer(name)
            if number == 0:
                decode.add(name, prompt, 2, answer.params)
                decode.answer(name)
        with prefill.slowed():
            decode.add(name, prompt, 2, answer.params)
            decode.answer(name)
        time.sleep(0.1)
        from tracing import times

        noted = decode.call(times)
    finally:
        prefill.close()
        decode.close()
    begun = noted["begun"][0]
    rows = {
        kind: [noted[kind].get(layer, float("nan")) - begun for layer in range(LAYERS)]
        for kind in ("landed", "asked", "computed")
    }
    return Timeline(**rows)


def plot(timeline: Timeline, target: Path) -> None:
    """Bars from the first wish for a layer to its landing, and when it was computed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    layers = range(LAYERS)
    before = [0.0, *timeline.landed[:-1]]
    axes.barh(
        layers,
        [(end - begin) * 1e3 for begin, end in zip(before, timeline.landed, strict=True)],
        left=[begin * 1e3 for begin in before],
        height=0.5,
        color="#9ecae1",
        label="on its way (after the layer before)",
    )
    axes.plot(
        [at * 1e3 for at in timeline.computed], layers, "D", color="#d94801", label="computed"
    )
    axes.axvline(
        timeline.landed[-1] * 1e3, color="grey", linestyle="--", label="the last has landed"
    )
    axes.set(
        xlabel="milliseconds since the step began",
        ylabel="layer",
        yticks=list(layers),
        title="Decode computes a layer as soon as it has landed",
    )
    axes.invert_yaxis()
    axes.legend(loc="lower left")
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--plot", type=Path, help="where to write the plot")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        timeline = measure("layerwise", Path(directory))
    print(timeline.table())
    if arguments.plot:
        plot(timeline, arguments.plot)


if __name__ == "__main__":
    main()
