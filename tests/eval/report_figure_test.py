"""Figures of recorded trials."""

from itertools import combinations

import numpy as np
import pytest
from made_up_study import SUMMARY, config, png_size, three
from matplotlib.figure import Figure

from linattn_jax.eval import report_figure
from linattn_jax.eval.report import summary
from linattn_jax.eval.report_figure import family, figure, style
from linattn_jax.layers import LAYERS
from linattn_jax.types import UserError


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws, and gives the axes."""
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))

    def draw(made, trials):
        figure(made, summary(made, trials), tmp_path / "a.png")
        png_size(tmp_path / "a.png")
        return kept[-1].axes

    return draw


def labels_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_few_mixers_share_a_panel(drawn):
    trials = [
        *three("linear", (0.2, 0.3, 0.4)),
        *three("vla", (0.5, 0.7)),
        *three("vla_x", (0.1,), "n=64", layer="vla"),
    ]
    (axes,) = drawn(config(), trials)
    assert labels_of(axes) == ["vla", "linear", "vla_x", "hollow: the paper's", "chance"]
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["vla"].get_xydata(), [[4, 60], [64, np.nan]])
    np.testing.assert_allclose(lines["chance"].get_xydata(), [[4, 10], [64, 10]])
    np.testing.assert_allclose(to_rgb_of(lines["linear"]), style("linear").colour)
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    points = [(line.get_xydata().tolist(), to_rgb_of(line)) for line in hollow if np.isfinite(line.get_ydata()).any()]
    np.testing.assert_allclose([point for point, _ in points], [[[4, 98.35], [64, np.nan]], [[4, np.nan], [64, 20]]])
    assert [colour for _, colour in points] == [style("vla").colour, style("linear").colour]
    vertices = [path.get_paths() for path in axes.collections]
    heights = np.concatenate([path.vertices[:, 1] for paths in vertices for path in paths])
    np.testing.assert_allclose(heights.min(), 20, atol=1e-6)  # 30 - 10, of linear
    np.testing.assert_allclose(heights.max(), 60 + 100 * np.std([0.5, 0.7], ddof=1), atol=1e-6)


def to_rgb_of(line):
    return tuple(line.get_color())


@pytest.mark.parametrize(
    ("x", "scale"), [((4, 64), "log"), ((8, 64), "log"), ((16, 64), "linear"), ((0, 64), "linear")]
)
def test_the_axis_is_logarithmic_where_it_spans_eightfold(drawn, x, scale):
    (axes,) = drawn(config(x=x), three("vla", (0.5, 0.7)))
    assert axes.get_xscale() == scale
    if scale == "log":
        assert axes.xaxis.get_transform().base == 2
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(tick) for tick in x]


def test_many_mixers_have_a_panel_a_family(drawn):
    rows = [row for name in LAYERS for row in three(name, (0.5, 0.6))]
    panels = drawn(config(), [*rows, *three("mine", (0.3,), layer="somewhere")])
    assert [axes.get_title() for axes in panels] == [
        "softmax attention",
        "linear attention and decay",
        "delta rules",
        "variational linear attention",
        "curvature-corrected queries",
        "state-space models",
        "others",
    ]
    own = [set(labels_of(axes)) - {"the others", "chance", "hollow: the paper's"} for axes in panels]
    assert own[3] == {"vla"}
    assert own[6] == {"mine"}
    assert set().union(*own) == {*LAYERS, "mine"}
    assert sum(map(len, own)) == len(LAYERS) + 1
    assert sum(line.get_color() == "0.85" for line in panels[3].lines) == len(LAYERS)


def test_one_column_has_a_row_a_mixer(drawn):
    made = config(columns=("n=4",), x=(4,), published={"vla": {"n=4": 0.9}})
    (axes,) = drawn(made, [*three("linear", (0.2, 0.3, 0.4)), *three("vla", (0.5,)), *three("kla", (0.6, 0.7))])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["linear", "vla", "kla"]


def test_lengths_must_agree(tmp_path):
    for wrong, said in (({"x": (1,)}, "x has 1"), ({"chance": (0.1, 0.2, 0.3)}, "chance has 3")):
        with pytest.raises(UserError, match=said):
            figure(config(**wrong), SUMMARY, tmp_path / "a.png")


def test_layers_look_different():
    for a, b in combinations(LAYERS, 2):
        assert style(a) != style(b), (a, b)
        if family(a) == family(b):
            distance = np.abs(np.subtract(style(a).colour, style(b).colour)).max()
            assert distance > 0.1, (a, b)
    assert style("vla_frozen") == style("vla_frozen") not in (style("vla"), style("vla_identity"))
    assert {family(name) for name in LAYERS} == set(report_figure._FAMILIES.values())
