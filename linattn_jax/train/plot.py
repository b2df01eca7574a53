"""loss.png: the training loss, smoothed, and the held-out loss of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter


def smoothed(values: np.ndarray, window: float) -> np.ndarray:
    """Exponential average [n] over about `window` values, started without bias."""
    keep = 1 - 1 / max(window, 1.0)
    average, weight = 0.0, 0.0
    result = np.empty(len(values))
    for i, value in enumerate(values):
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result[i] = average / weight
    return result


def plot_loss(path: str | Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """Writes the picture; `records` are those of metrics.jsonl. Loss in nats per token against the step.

    Where every record tells bits per byte (a tokenizer of bytes), the right axis tells them.
    """
    train = [r for r in records if r.get("loss") is not None]
    heldout = [r for r in records if r.get("heldout_nats_per_token") is not None]
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps = np.array([r["step"] for r in train])
        losses = np.array([r["loss"] for r in train], float)
        axes.plot(steps, losses, color="#9ecae1", linewidth=0.9, label="training")
        if len(train) >= 20:
            smooth = smoothed(losses, len(losses) / 25)
            axes.plot(steps, smooth, color="#08519c", linewidth=1.8, label="training, smoothed")
    if heldout:
        points = np.array([(r["step"], r["heldout_nats_per_token"]) for r in heldout], float)
        axes.plot(*points.T, color="#d95f02", marker="o", markersize=4, linewidth=1.2, label="held out")
        axes.annotate(
            f"{points[-1, 1]:.3f}",
            points[-1],
            textcoords="offset points",
            xytext=(-4, 8),
            ha="right",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
            color="#d95f02",
        )
    _limits(axes, train, heldout)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ratio = _bits_per_nat(heldout)
    if ratio:
        scale = (lambda x: np.asarray(x) * ratio, lambda x: np.asarray(x) / ratio)
        right = axes.secondary_yaxis("right", functions=scale)
        right.set_ylabel("bits per byte of held-out text")
    if train or heldout:
        axes.legend(frameon=False)
    figure.savefig(path)


def _limits(axes: Any, train: Sequence[dict[str, Any]], heldout: Sequence[dict[str, Any]]) -> None:
    """The first steps fall from the loss of guessing; they must not press the rest of the curve flat."""
    values = np.array([r["loss"] for r in train] + [r["heldout_nats_per_token"] for r in heldout], float)
    if len(values) < 20:
        return
    low, high = values.min(), np.quantile(values, 0.98)
    margin = 0.05 * max(high - low, 1e-3)
    axes.set_ylim(low - margin, high + 2 * margin)


def _bits_per_nat(heldout: Sequence[dict[str, Any]]) -> float | None:
    """Bits per byte for each nat per token on the held-out text: one number for a text and tokenizer."""
    if not heldout or not heldout[-1].get("heldout_bits_per_byte"):
        return None
    return heldout[-1]["heldout_bits_per_byte"] / heldout[-1]["heldout_nats_per_token"]
