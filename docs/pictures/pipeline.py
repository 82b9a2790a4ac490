"""Draw the pipeline from a gradient to the change of a parameter, with its modules."""

from draw import BLUE, FAINT, GREEN, GREY, HERE, ORANGE, Picture, heading


def draw(folder=HERE) -> None:
    """Draw five boxes in a row, and the executors that may run them."""
    picture = Picture(1000, 430, "One formula an optimizer, one pipeline for all")
    heading(picture, "The blue box is all that an optimizer writes; the others are shared.")
    boxes = [
        (ORANGE, "decode", ["parameter, moments", "as float32, whatever", "their storage"]),
        (BLUE, "rule", ["gradient, state", "→ direction, state", "one file an optimizer"]),
        (
            GREEN,
            "delta",
            ["u = -(lr·d + decay·p)", "decay of every kind,", "scaling, lookahead"],
        ),
        (GREEN, "add", ["p + u, with Kahan", "compensation: decay", "is compensated too"]),
        (ORANGE, "encode", ["bfloat16, 8 bits,", "16 bits more:", "as storage= says"]),
    ]
    width, gap, top = 168, 28, 96
    for i, (color, title, lines) in enumerate(boxes):
        x = 24 + i * (width + gap)
        picture.box(x, top, width, 126, color)
        picture.text(x + width / 2, top + 28, title, 19, bold=True)
        for j, line in enumerate(lines):
            picture.text(x + width / 2, top + 58 + 23 * j, line, 15, FAINT)
        if i:
            picture.line((x - gap + 2, top + 59), (x - 2, top + 59), arrow=True)
    middle = 24 + 2.5 * width + 2 * gap
    picture.line((middle, top + 126), (middle, top + 156))
    picture.text(
        middle, top + 178, "the same function of one tensor, in every place:", 17, bold=True
    )
    places = [
        ("pure step", "vmap, grad, jvp"),
        ("compiled kernel", "one a dtype"),
        ("class", "torch.optim's"),
        ("backward", "gradient release"),
        ("whole step", "one graph"),
        ("shards", "FSDP2 and others"),
    ]
    width, gap = 146, 15.2
    for i, (title, line) in enumerate(places):
        x = 24 + i * (width + gap)
        picture.box(x, top + 206, width, 64, GREY)
        picture.text(x + width / 2, top + 233, title, 15, bold=True)
        picture.text(x + width / 2, top + 254, line, 15, FAINT)
    picture.text(
        24,
        410,
        "orange: core/storage, core/codes · blue: optimizers/ · green: core/leaf · grey: "
        "pure, execution, compiled, gradient_release",
        14.5,
        FAINT,
        anchor="start",
    )
    picture.save("pipeline.svg", folder)


if __name__ == "__main__":
    draw()
