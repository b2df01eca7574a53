"""The figure of a study: accuracy of every mixer along the study's axis, with spread and the paper's numbers."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from linattn_jax.eval.report import Result, Summary, layer_of
from linattn_jax.layers import LAYERS
from linattn_jax.types import UserError

# Beyond this many lines a panel shows one family, with the others in grey behind.
_CROWD = 8
_FAMILIES = {
    "softmax": "softmax attention",
    "linear": "linear attention and decay",
    "delta": "delta rules",
    "kla": "delta rules",
    "variational": "variational linear attention",
    "curvature": "curvature-corrected queries",
    "state_space": "state-space models",
}
_HUES = {
    "softmax": "#222222",
    "linear": "#7f7f7f",
    "retention": "#8c564b",
    "mamba2": "#bc8f00",
    "gla": "#2ca02c",
    "deltanet": "#1f77b4",
    "gdn": "#9467bd",
    "kla": "#ff7f0e",
    "vla": "#d62728",
    "interdomain": "#17becf",
    "s4d": "#e377c2",
    "longhorn": "#6b8e23",
}
_MARKERS = "osD^vPX<>h"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1.5, 1)))


class Style(NamedTuple):
    """How a mixer is drawn in every figure."""

    colour: tuple[float, float, float]
    marker: str
    dash: Any


def style(label: str) -> Style:
    """The style of a label, the same in all figures.

    A layer has the hue of its rule, dashed where it is a paper's own version or CCQ upon the rule. A label that is no
    layer has a hue from its letters.
    """
    letters = zlib.crc32(label.encode())
    if label not in LAYERS:
        hue = colorsys.hls_to_rgb((letters & 0xFFFF) / 0x10000, 0.42, 0.65)
        return Style(hue, _MARKERS[letters % len(_MARKERS)], _DASHES[1 + (letters >> 8) % (len(_DASHES) - 1)])
    corrected = label.startswith("ccq_")
    rule, _, version = label.removeprefix("ccq_").partition("_")
    place = list(_HUES).index(rule) if rule in _HUES else letters % len(_HUES)
    colour = to_rgb(list(_HUES.values())[place])
    if version:
        colour = (0.65 * colour[0] + 0.35, 0.65 * colour[1] + 0.35, 0.65 * colour[2] + 0.35)
    if version == "vla":
        colour = (0.6 * colour[0], 0.6 * colour[1], 0.6 * colour[2])
    return Style(
        colour, _MARKERS[(place + corrected) % len(_MARKERS)], _DASHES[2 if corrected else 1 if version else 0]
    )


def family(layer: str) -> str:
    """The heading that a layer's panel has: the file that defines it says which."""
    room = LAYERS[layer].__module__.rpartition(".")[2] if layer in LAYERS else ""
    return _FAMILIES.get(room, "others")


def figure(config: Any, summary: Summary, path: str | Path) -> None:
    """Writes the PNG at `path`.

    Lines are means over seeds, bands one sample standard deviation to each side, hollow markers the paper's numbers. A
    study of one column is drawn as one row a mixer.

    Raises:
        UserError: the config's x or chance is not as long as its columns.
    """
    shown = {label: result for label, result in summary.items() if _known(result)}
    for name in ("x", "chance"):
        given = config.get(name)
        if given is not None and not isinstance(given, int | float) and len(given) != len(config.columns):
            raise UserError(f"{name} has {len(given)} numbers, wanted one for each of {len(config.columns)} columns")
    drawing = Figure(dpi=120, layout="constrained")
    FigureCanvasAgg(drawing)
    if len(config.columns) == 1:
        _rows(drawing, config, shown)
    else:
        _panels(drawing, config, shown)
    drawing.suptitle(config.title, fontsize=11)
    drawing.savefig(path)


def _known(result: Result) -> bool:
    return any(cell.values or cell.published is not None for cell in result.cells.values())


def _panels(drawing: Figure, config: Any, shown: Summary) -> None:
    groups: dict[str, list[str]] = {}
    if len(shown) > _CROWD:
        for heading in (*dict.fromkeys(_FAMILIES.values()), "others"):
            if labels := [label for label, r in shown.items() if family(r.layer or layer_of(label)) == heading]:
                groups[heading] = labels
    else:
        groups[""] = list(shown)
    across = 1 if len(groups) == 1 else 2
    down = -(-len(groups) // across)
    drawing.set_size_inches(8.6 if across == 1 else 12.4, max(4.6, 3.1 * down + 0.4))
    grid = drawing.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    for axes, (heading, labels) in zip(grid, groups.items(), strict=False):
        for label in shown.keys() - set(labels):
            axes.plot(_x(config), _means(shown[label]), color="0.85", linewidth=0.9, zorder=1)
        handles = [_line(axes, config, label, shown[label]) for label in _ranked(labels, shown)]
        handles += _furniture(axes, config, labels, shown)
        if labels != list(shown):
            handles.append(Line2D([], [], color="0.85", label="the others"))
        axes.set_title(heading, fontsize=9.5)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=8.5)
    _axes(grid, config, shown)
    for spare in grid[len(groups) :]:
        spare.remove()
    for i, axes in enumerate(grid[: len(groups)]):
        axes.tick_params(labelbottom=i + across >= len(groups), labelleft=i % across == 0)
    drawing.supxlabel(config.get("x_label") or "", fontsize=9.5)
    drawing.supylabel("accuracy, %", fontsize=9.5)


def _x(config: Any) -> np.ndarray:
    given = config.get("x")
    return np.arange(len(config.columns), dtype=float) if given is None else np.array(given, float)


def _means(result: Result) -> np.ndarray:
    return np.array([np.nan if cell.mean is None else 100 * cell.mean for cell in result.cells.values()])


def _stds(result: Result) -> np.ndarray:
    return np.array([100 * cell.std for cell in result.cells.values()])


def _published(result: Result) -> np.ndarray:
    return np.array([np.nan if c.published is None else 100 * c.published for c in result.cells.values()])


def _ranked(labels: Sequence[str], shown: Summary) -> list[str]:
    """Labels from the highest line to the lowest, by the mean over columns: the order of the legend."""

    def height(label: str) -> float:
        known = [cell.mean for cell in shown[label].cells.values() if cell.mean is not None]
        return sum(known) / len(known) if known else -1.0

    return sorted(labels, key=height, reverse=True)


def _line(axes: Any, config: Any, label: str, result: Result) -> Line2D:
    x, means, stds, published = _x(config), _means(result), _stds(result), _published(result)
    look = style(label)
    # A gap in the columns is a gap in the line.
    (line,) = axes.plot(x, means, color=look.colour, marker=look.marker, linestyle=look.dash, markersize=4.5, zorder=3)
    axes.fill_between(
        x, np.maximum(means - stds, 0), np.minimum(means + stds, 100), color=look.colour, alpha=0.15, linewidth=0
    )
    axes.plot(
        x,
        published,
        look.marker,
        color=look.colour,
        markersize=8,
        markerfacecolor="none",
        markeredgewidth=1.3,
        zorder=4,
    )
    line.set_label(label)
    return line


def _furniture(axes: Any, config: Any, labels: Sequence[str], shown: Summary) -> list[Line2D]:
    """Grid and chance; the entries of the legend for what is not a mixer."""
    axes.grid(alpha=0.25)
    handles = []
    if any(not np.isnan(_published(shown[label])).all() for label in labels):
        handles.append(_hollow())
    if config.get("chance") is not None:
        chance = 100 * np.broadcast_to(np.array(config.chance, float), len(config.columns))
        handles += axes.plot(_x(config), chance, color="0.5", linestyle=":", linewidth=1.2, label="chance", zorder=2)
    return handles


def _hollow() -> Line2D:
    label = "hollow: the paper's"
    return Line2D([], [], color="0.3", label=label, marker="o", markerfacecolor="none", markersize=8, linestyle="")


def _axes(grid: Sequence[Any], config: Any, shown: Summary) -> None:
    x = _x(config)
    chance: Any = [] if config.get("chance") is None else np.atleast_1d(np.array(config.chance, float)) * 100
    heights = np.concatenate([*map(_means, shown.values()), *map(_published, shown.values()), chance])
    heights = heights[~np.isnan(heights)]
    for axes in grid[:1]:  # the others share them
        if len(heights):
            margin = max(0.05 * (heights.max() - heights.min()), 0.5)
            axes.set_ylim(max(heights.min() - margin, -3), min(heights.max() + margin, 103))
    for axes in grid:
        if config.get("x") is None:
            axes.set_xticks(x, config.columns)
            continue
        if x.min() > 0 and x.max() / x.min() >= 8:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_minor_locator(NullLocator())
        # With more numbers than fit, every other one.
        ticks = x[:: 1 + len(x) // 12]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _rows(drawing: Figure, config: Any, shown: Summary) -> None:
    """One column: a row a mixer, the best on top."""
    labels = _ranked(list(shown), shown)[::-1]
    drawing.set_size_inches(7.2, 1.3 + 0.3 * max(len(labels), 4))
    axes = drawing.add_subplot()
    for height, label in enumerate(labels):
        (cell,), look = shown[label].cells.values(), style(label)
        if cell.mean is not None:
            error = None if np.isnan(cell.std) else 100 * cell.std
            axes.errorbar(
                100 * cell.mean, height, xerr=error, fmt=look.marker, color=look.colour, markersize=5, capsize=3
            )
        if cell.published is not None:
            axes.plot(100 * cell.published, height, "o", color=look.colour, markersize=9, markerfacecolor="none")
    handles = []
    if any(shown[label].cells[config.columns[0]].published is not None for label in labels):
        handles.append(_hollow())
    if config.get("chance") is not None:
        chance = 100 * float(np.ravel(config.chance)[0])
        handles.append(axes.axvline(chance, color="0.5", linestyle=":", linewidth=1.2, label="chance"))
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(alpha=0.25)
    axes.set_xlabel(f"accuracy, % ({config.columns[0]})")
    if handles:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=8.5)
