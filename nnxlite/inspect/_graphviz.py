"""A picture as text for Graphviz and for Mermaid."""

from __future__ import annotations

import typing as tp

from nnxlite.inspect._picture import Item, Picture
from nnxlite.inspect._svg import colour_of


def dot_of(picture: Picture) -> str:
    """The picture in the language of Graphviz: boxes are clusters, each with an anchor for arrows."""
    lines = [
        "digraph model {",
        "  compound=true",
        '  graph [fontname="monospace", style=rounded, color="#8d99ae"]',
        '  node [fontname="monospace", fontsize=10, shape=box, style="rounded,filled"]',
        '  edge [fontname="monospace", fontsize=9]',
    ]
    _dot_item(picture.root, lines, "  ")
    inside = _to_surrounding(picture)
    for _, reference in picture.references:
        target = reference.target
        if target is not None:
            is_node = target.kind is not None or reference.key in inside
            head = "" if is_node else f", lhead=cluster_{target.key}"
            lines.append(f"  {reference.key} -> {target.key} [style=dashed{head}]")
    for first, second, label in picture.call_edges:
        ends = [f"ltail=cluster_{first.key}"] * (first.kind is None)
        ends += [f"lhead=cluster_{second.key}"] * (second.kind is None)
        options = ", ".join([f"label={_quoted(label)}", *ends])
        lines.append(f"  {first.key} -> {second.key} [{options}]")
    return "\n".join([*lines, "}"]) + "\n"


def _to_surrounding(picture: Picture) -> set[str]:
    """The keys of references to a box that they are in: their arrows end at a point in it."""
    parents = {id(child): item for item in picture.root.walk() for child in item.children}
    found = set()
    for item, reference in picture.references:
        around: Item | None = item
        while around is not None and around is not reference.target:
            around = parents.get(id(around))
        if around is not None:
            found.add(reference.key)
    return found


def _dot_item(item: Item, lines: list[str], pad: str) -> None:
    if item.kind is not None:
        lines.append(
            f'{pad}{item.key} [label={_quoted(item.label)}, fillcolor="{colour_of(item.kind)}"]'
        )
        return
    lines.append(f"{pad}subgraph cluster_{item.key} {{")
    label = f"{item.label}\n{item.settings}" if item.settings else item.label
    lines.append(f"{pad}  label={_quoted(label)}")
    lines.append(f'{pad}  {item.key} [shape=point, style=invis, width=0, label=""]')
    for child in item.children:
        _dot_item(child, lines, pad + "  ")
    for reference in item.references:
        lines.append(f"{pad}  {reference.key} [label={_quoted(reference.label)}, style=dashed]")
    lines.append(f"{pad}}}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def mermaid_of(picture: Picture) -> str:
    """The picture as a flowchart of Mermaid, which many sites show where they find it in Markdown."""
    lines = ["flowchart TD"]
    classes: dict[str, str] = {}
    inside = _to_surrounding(picture)
    references = [reference for _, reference in picture.references if reference.target is not None]
    anchors = {reference.target for reference in references if reference.key in inside}
    _mermaid_item(picture.root, lines, "  ", classes, anchors)
    for reference in references:
        assert reference.target is not None
        end = "_self" if reference.key in inside else ""
        lines.append(f"  {reference.key} -.-> {reference.target.key}{end}")
    for first, second, label in picture.call_edges:
        inside = f"|{_entity(label)}|" if label else ""
        lines.append(f"  {first.key} -->{inside} {second.key}")
    for kind, name in classes.items():
        lines.append(f"  classDef {name} fill:{colour_of(kind)},stroke:#8d99ae,color:#000")
    return "\n".join(lines) + "\n"


def _mermaid_item(
    item: Item,
    lines: list[str],
    pad: str,
    classes: dict[str, str],
    anchors: tp.Container[Item | None],
) -> None:
    if item.kind is not None:
        name = classes.setdefault(item.kind, f"kind{len(classes)}")
        lines.append(f"{pad}{item.key}[{_entity(item.label)}]:::{name}")
        return
    if not item.children and not item.references:
        lines.append(f"{pad}{item.key}[{_entity(item.label)}]")
        return
    lines.append(f"{pad}subgraph {item.key}[{_entity(item.label)}]")
    if item in anchors:
        lines.append(f"{pad}  {item.key}_self((self))")
    for child in item.children:
        _mermaid_item(child, lines, pad + "  ", classes, anchors)
    for reference in item.references:
        lines.append(f"{pad}  {reference.key}([{_entity(reference.label)}])")
    lines.append(f"{pad}end")


_ENTITIES: tp.Final = {
    "#": "#35;",
    "&": "#amp;",
    '"': "#quot;",
    "<": "#lt;",
    ">": "#gt;",
    "\n": " ",
}


def _entity(text: str) -> str:
    return '"' + "".join(_ENTITIES.get(c, c) for c in text) + '"'
