"""Writes the pages that are made from the code, and the table of mixers in the README.

    python docs/pages.py

A mixer's docstring begins "Name (source, with a year): update." and has a paragraph that begins "Ours:", which says
what is not in the source. Every argument is described in its Args, in those of a mixer that it names in backticks ("the
other arguments are those of `delta_rule`"), or in their texts.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import linattn_jax
from linattn_jax import gates, layers, types
from linattn_jax.layers import LAYERS, MixerLayer
from linattn_jax.mixers.dispatch import MIXERS, Mixer
from linattn_jax.models import Decoder, DecoderConfig
from linattn_jax.types import UserError

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- mixers: make docs writes this table -->", "<!-- end of mixers -->"

# Where bytes and operations are counted.
SIZES = {"B": 1, "Hk": 16, "H": 16, "K": 128, "V": 128, "N": 32, "M": 64, "D": 2048}


class Docstring(NamedTuple):
    """A docstring's parts; `first` is its first paragraph, `text` the others that are none of what follows."""

    first: str
    text: str
    ours: str
    arguments: dict[str, str]
    returns: str
    raises: str
    example: str


def parse(function: Callable[..., Any]) -> Docstring:
    """The parts of a function's docstring."""
    text = inspect.getdoc(function) or ""
    sections = {}
    for match in re.finditer(r"^(Args|Returns|Raises):\n((?: .*\n?|\n)+)", text, re.M):
        sections[match[1]] = inspect.cleandoc(match[2])
    text = re.sub(r"^(Args|Returns|Raises):\n((?: .*\n?|\n)+)", "", text, flags=re.M)
    paragraphs = re.split(r"\n\s*\n", text.strip())
    examples = [p for p in paragraphs if p.startswith(">>>")]
    ours = [p for p in paragraphs if p.startswith("Ours: ")]
    rest = [p for p in paragraphs if p not in examples + ours]
    arguments: dict[str, str] = {}
    for match in re.finditer(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", sections.get("Args", ""), re.M):
        arguments |= dict.fromkeys(match[1].split(", "), " ".join(match[2].split()))
    ours_text = " ".join(ours).removeprefix("Ours: ")
    returns, raises = sections.get("Returns", ""), sections.get("Raises", "")
    return Docstring(rest[0], "\n\n".join(rest[1:]), ours_text, arguments, returns, raises, "\n\n".join(examples))


def summary(mixer: Mixer) -> tuple[str, str, str]:
    """Name, source and update, as the docstring's first paragraph says them."""
    first = " ".join(parse(mixer.call).first.split())
    match = re.fullmatch(r"([^()]+) \(([^()]*\d{4}[^()]*)\)([^():]*): (.+)\.", first)
    if match is None:
        raise UserError(f"{mixer.name}: docstring begins {first!r}, wanted 'Name (source, with a year): update.'")
    return match[1] + match[3], match[2], match[4].replace("`", "")


def ours(mixer: Mixer) -> str:
    """What the docstring says is not in the source."""
    text = parse(mixer.call).ours
    if not text:
        raise UserError(f"{mixer.name}: the docstring has no paragraph that begins 'Ours:'.")
    return text


def referred(mixer: Mixer) -> list[Mixer]:
    """The mixer, then those that its docstring names in backticks, and theirs, nearest first."""
    mixers = [mixer]
    for one in mixers:
        names = dict.fromkeys(re.findall(r"`(\w+)`", inspect.getdoc(one.call) or ""))
        mixers += [MIXERS[name] for name in names if name in MIXERS and MIXERS[name] not in mixers]
    return mixers


def described(mixer: Mixer, name: str) -> str:
    """What is said of an argument by the Args of the mixer and those that it names, or else where a text does."""
    mixers = referred(mixer)
    for one in mixers:
        if name in parse(one.call).arguments:
            return parse(one.call).arguments[name]
    for one in mixers:
        if re.search(rf"\b{name}\b", parse(one.call).text):
            return "see the text above" if one is mixer else f"see `{one.name}`"
    raise UserError(f"{mixer.name}: nothing in the docstring, or in those that it names, says what {name} is.")


class Field(NamedTuple):
    """An array of a state: its name, axes, dtype and bytes at SIZES."""

    name: str
    axes: str
    dtype: str
    size: int


def state_fields(mixer: Mixer) -> list[Field]:
    """The arrays of the mixer's state; the axes are found from sizes that are powers of two, whose sums tell them."""
    bits = {axis: 2 << i for i, axis in enumerate(SIZES)}
    empty = lambda sizes: jax.tree.leaves_with_path(jax.eval_shape(lambda: mixer.empty(sizes, jnp.float32)))
    fields = []
    for (path, coded), (_, real) in zip(empty(bits), empty(SIZES), strict=True):
        axes = []
        for code, size in zip(coded.shape, real.shape, strict=True):
            found = [axis for axis, bit in bits.items() if code & bit]
            axes.append(" + ".join(found) if sum(SIZES[axis] for axis in found) == size else str(size))
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        fields.append(Field(name, f"[{', '.join(axes)}]", str(real.dtype), real.size * real.dtype.itemsize))
    return fields


def token_operations(mixer: Mixer) -> int:
    """Floating-point operations of one `_step` at SIZES, as XLA counts them in the program before it optimises it."""

    def shaped(argument: types.Argument) -> jax.ShapeDtypeStruct:
        dtype = jnp.complex64 if argument.kind == "complex" else jnp.float32
        return jax.ShapeDtypeStruct([SIZES[axis] for axis in argument.of_token.axes.split()], dtype)

    state = jax.eval_shape(lambda: mixer.empty(SIZES, jnp.float32))
    analysis = jax.jit(mixer.step).lower(state, *map(shaped, mixer.arguments.values())).cost_analysis()
    return int(analysis["flops"]) if analysis else 0


@cache
def layer_mixers() -> dict[str, tuple[str, ...]]:
    """The mixers that each layer calls, by the layer's name in configurations: a decoder of one layer is traced."""
    codes = {inspect.unwrap(m.call).__code__: name for name, m in MIXERS.items()}
    called: dict[str, None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called[codes[frame.f_code]] = None

    found = {}
    for layer in LAYERS:
        config = DecoderConfig(vocab_size=8, layers=1, width=64, heads=2, head_size=32, mixers=(layer,))
        called.clear()
        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            jax.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 8), jnp.int32))[0])
        finally:
            sys.setprofile(before)
        found[layer] = tuple(called)
    return found


def layers_of(mixer: Mixer) -> list[str]:
    """Names in configurations of the layers that call the mixer."""
    return [layer for layer, names in layer_mixers().items() if mixer.name in names]


# Markdown -------------------------------------------------------------------------------------------------------------


def prose(text: str, folder: str = "") -> str:
    """Docstring text as Markdown: indented lines become blocks, mixers in backticks links to `folder`."""

    def span(match: re.Match[str]) -> str:
        if match[1] is None:
            return f"\\{match[0]}"
        return f"[`{match[1]}`]({folder}{match[1]}.md)" if match[1] in MIXERS else match[0]

    lines, inside = [], False
    for line in text.splitlines():
        block = line.startswith("    ") or (inside and not line.strip())
        if block != inside:
            lines += ["", "```text"] if block else ["```", ""]
        lines.append(line[4:] if block else re.sub(r"`([^`]+)`|[\\*_<>\[\]|#~$]", span, line))
        inside = block
    return "\n".join([*lines, "```"] if inside else lines)


def code(text: str, language: str = "python") -> str:
    """A fenced block."""
    return f"```{language}\n{text}\n```"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a bar in a cell is not its end."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines)


def signature(function: Callable[..., Any], name: str) -> str:
    """The call, with defaults and without types."""
    parts: list[str] = []
    for p in inspect.signature(function).parameters.values():
        if p.name == "self":
            continue
        if p.kind == p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(p.name if p.default is p.empty else f"{p.name}={getattr(p.default, '__name__', repr(p.default))}")
    line = f"{name}({', '.join(parts)})"
    return code(line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + ",\n)")


def entry(name: str, function: Callable[..., Any], folder: str = "") -> str:
    """Signature, text and example of a function that is not a mixer."""
    d = parse(function)
    parts = [f"## `{name}`", signature(function, name), prose(d.first, folder), prose(d.text, folder)]
    if d.arguments:
        rows = ((f"`{argument}`", prose(meaning, folder)) for argument, meaning in d.arguments.items())
        parts.append(table(("argument", "meaning"), rows))
    parts += [f"{what}: {prose(text, folder)}" for what, text in (("Returns", d.returns), ("Raises", d.raises)) if text]
    return "\n\n".join(filter(None, [*parts, d.example and code(d.example, "pycon")]))


def owner(name: str) -> str | None:
    """The mixer that a public function belongs to: `gla` of `gla_step`."""
    return max((m for m in MIXERS if name == m or name.startswith(f"{m}_")), key=len, default=None)


def mixer_table(*, links: bool) -> str:
    """One row for each mixer of the registry; links are to the pages beside."""
    rows = []
    for name, mixer in MIXERS.items():
        _, source, update = summary(mixer)
        fields = state_fields(mixer)
        state = ", ".join(f"{f.name} {f.axes}" for f in fields)
        rows.append(
            (
                f"[`{name}`]({name}.md)" if links else f"`{name}`",
                ", ".join(f"`{layer}`" for layer in layers_of(mixer)),
                f"`{update}`",
                source,
                f"{state}: {sum(f.size for f in fields):,}",
                ", ".join((*mixer.implementations, *mixer.kernels)),
            )
        )
    return table(("function", "layers", "update, per head", "source", "state: bytes", "implementations"), rows)


def sizes() -> str:
    """SIZES in words."""
    return ", ".join(f"{axis} = {size}" for axis, size in SIZES.items())


def mixer_page(mixer: Mixer) -> str:
    """All that the code says of a mixer."""
    title, source, update = summary(mixer)
    documents = [parse(one.call) for one in referred(mixer)]
    own = documents[0]
    parameters = inspect.signature(mixer.call).parameters
    options = [p for p in parameters.values() if p.name not in mixer.arguments]
    fields = state_fields(mixer)
    callers = ", ".join(f"[`{layer}`](../layers.md)" for layer in layers_of(mixer))
    meaning = lambda name: prose(described(mixer, name))
    returns = next((d.returns for d in documents if d.returns), "")
    raises = next((d.raises for d in documents if d.raises), "")
    parts = [
        f"# `{mixer.name}`",
        f"{title} ({source}).",
        code(update, "text"),
        f"Layers that call it: {callers or 'none'}. Implementations: "
        f"{', '.join((*mixer.implementations, *mixer.kernels))}.",
        signature(mixer.call, mixer.name),
        prose(own.text),
        f"Ours, and not in the source: {prose(ours(mixer))}",
        "## Recurrence",
        prose(inspect.getdoc(inspect.getmodule(mixer.call)) or ""),
        "## Arguments",
        table(
            ("array", "axes", "kind", "meaning"),
            (
                (f"`{name}`", f"`[{', '.join(a.axes.split())}]`", a.kind, meaning(name))
                for name, a in mixer.arguments.items()
            ),
        ),
        f"Output: `[{', '.join(mixer.output.split())}]`. The [list of mixers](index.md) explains axes and kinds.",
        table(
            ("option", "type", "default", "meaning"),
            ((f"`{p.name}`", f"`{p.annotation}`", f"`{p.default!r}`", meaning(p.name)) for p in options),
        ),
        f"Returns: {prose(returns)}" if returns else "",
        f"Raises: {prose(raises)}" if raises else "",
        "## State and cost",
        f"At {sizes()}:",
        table(
            ("field", "axes", "dtype", "bytes"),
            [
                *((f"`{f.name}`", f"`{f.axes}`", f.dtype, f"{f.size:,}") for f in fields),
                ("all", "", "", f"{sum(f.size for f in fields):,}"),
            ],
        ),
        f"Decoding a token takes {token_operations(mixer):,} floating-point operations at these sizes, a "
        "multiplication and an addition being two, as XLA counts them in the program of "
        f"`{mixer.name}_step` before it optimises it.",
        "## Example",
        code(own.example, "pycon"),
    ]
    companions = [n for n in linattn_jax.__all__ if owner(n) == mixer.name and n != mixer.name]
    parts += [entry(name, getattr(linattn_jax, name)) for name in companions]
    return "\n\n".join(filter(None, parts)) + "\n"


def index_page() -> str:
    """The table with links, and what the pages have in common."""
    names = "\n".join(MIXERS)
    parts = [
        "# Mixers",
        prose(inspect.getdoc(linattn_jax) or ""),
        mixer_table(links=True),
        f"Bytes are those of a float32 state at {sizes()}.",
        "## Axes",
        prose(inspect.getdoc(types) or ""),
        "## Kinds of arguments",
        prose(inspect.getdoc(types.Argument) or ""),
        f"```{{toctree}}\n:hidden:\n\n{names}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def layers_page() -> str:
    """One section for each layer, under its name in configurations."""
    parts = [
        "# Layers",
        prose(inspect.getdoc(layers) or "", "mixers/"),
        prose(inspect.getdoc(MixerLayer) or "", "mixers/"),
    ]
    for layer, kind in LAYERS.items():
        calls = ", ".join(f"[`{name}`](mixers/{name}.md)" for name in layer_mixers()[layer])
        parts += [
            f"## `{layer}`",
            signature(kind.__init__, kind.__name__),
            prose(inspect.getdoc(kind) or "", "mixers/"),
            f"Calls {calls}." if calls else "",
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def functions_page(title: str, text: str, functions: Mapping[str, Callable[..., Any]]) -> str:
    """One section for each function."""
    entries = (entry(name, function, "mixers/") for name, function in functions.items())
    return "\n\n".join([f"# {title}", prose(text, "mixers/"), *entries]) + "\n"


def pages() -> dict[str, str]:
    """Every page that is made from the code, by its path in docs."""
    public = {n: f for n, f in vars(gates).items() if inspect.isfunction(f) and f.__module__ == gates.__name__}
    others = {n: getattr(linattn_jax, n) for n in linattn_jax.__all__ if owner(n) is None}
    made = {f"mixers/{name}.md": mixer_page(mixer) for name, mixer in MIXERS.items()}
    made["mixers/index.md"] = index_page()
    made["layers.md"] = layers_page()
    made["gates.md"] = functions_page("Gates", inspect.getdoc(gates) or "", public)
    made["others.md"] = functions_page("Others", "Public functions outside the registry of mixers.", others)
    return made


def with_table(readme: str) -> str:
    """The README with the table that the registry gives."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise UserError(f"README.md: wanted the lines {BEGIN!r} and {END!r}.")
    made = f"{mixer_table(links=False)}\n\nBytes are those of a float32 state at {sizes()}."
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Writes them all."""
    docs = ROOT / "docs"
    shutil.rmtree(docs / "mixers", ignore_errors=True)
    (docs / "mixers").mkdir()
    for path, text in pages().items():
        (docs / path).write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
