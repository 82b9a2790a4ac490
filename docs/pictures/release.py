"""Draw the timeline of a step, with and without gradient release."""

from draw import BLUE, FAINT, GREEN, GREY, HERE, INK, ORANGE, Picture, heading

LAYERS = 4
LEFT, RIGHT = 150, 976


def row(picture: Picture, y: float, events: list[tuple[float, float, str, str]]) -> None:
    """Draw boxes of the form (begin, end, color, word) on one line."""
    for begin, end, color, word in events:
        picture.box(begin, y, end - begin, 34, color)
        picture.text((begin + end) / 2, y + 22, word, 16)


def area(
    picture: Picture, base: float, points: list[tuple[float, float]], words: str
) -> None:
    """Draw the number of gradients that are alive, over time."""
    path = " ".join(f"{x:.1f},{base - y:.1f}" for x, y in points)
    picture.parts.append(
        f'<polygon points="{points[0][0]:.1f},{base} {path} {points[-1][0]:.1f},{base}" '
        f'fill="{ORANGE}" fill-opacity="0.25" stroke="{ORANGE}" stroke-width="1.5"/>'
    )
    picture.line((LEFT, base), (RIGHT, base), color=FAINT, width=1)
    picture.text(LEFT - 12, base - 28, "gradients", 16, FAINT, anchor="end")
    picture.text(LEFT - 12, base - 10, "alive", 16, FAINT, anchor="end")
    x, y = max(points, key=lambda point: point[1])
    picture.text(x, base - y - 8, words, 16, INK)


def draw(folder=HERE) -> None:
    """Draw a row for each kind of step, and the gradients that are alive below it."""
    picture = Picture(1000, 480, "With gradient release one gradient is alive at a time")
    heading(
        picture,
        "A training step of four layers. Time runs to the right.",
    )
    forward, back, update, unit = 70.0, 88.0, 44.0, 15.0

    y = 92.0
    picture.text(24, y + 22, "ordinary", 17, anchor="start", bold=True)
    x, events = float(LEFT), []
    for i in range(LAYERS):
        events.append((x, x + forward * 0.9, GREY, f"fwd {i + 1}"))
        x += forward * 0.9 + 4
    points = [(x, 0.0)]
    for i in reversed(range(LAYERS)):
        events.append((x, x + back, BLUE, f"back {i + 1}"))
        x += back + 4
        points += [(x - 4, points[-1][1]), (x - 4, points[-1][1] + unit)]
    events.append((x, x + LAYERS * update - 4, GREEN, "step(): all"))
    x += LAYERS * update
    points += [(x, points[-1][1]), (x, 0.0)]
    row(picture, y, events)
    area(picture, y + 130, points, "all of them, as large as the model")

    y = 278.0
    picture.text(24, y + 22, "released", 17, anchor="start", bold=True)
    x, events, points = float(LEFT), [], []
    for i in range(LAYERS):
        events.append((x, x + forward * 0.9, GREY, f"fwd {i + 1}"))
        x += forward * 0.9 + 4
    points = [(x, 0.0)]
    for i in reversed(range(LAYERS)):
        events.append((x, x + back, BLUE, f"back {i + 1}"))
        x += back + 2
        points += [(x - 2, 0.0), (x - 2, unit)]
        events.append((x, x + update - 4, GREEN, f"p{i + 1}"))
        x += update
        points += [(x - 4, unit), (x - 4, 0.0)]
    row(picture, y, events)
    area(picture, y + 100, points, "the largest one")
    picture.text(
        24,
        y + 146,
        "Each parameter is updated (green) as soon as its gradient is complete; then the "
        "gradient is freed.",
        17,
        anchor="start",
    )
    picture.text(
        24,
        y + 172,
        "Parameters, state and losses are the ordinary step's, bit for bit. Small "
        "gradients share one call.",
        17,
        FAINT,
        anchor="start",
    )
    picture.save("release.svg", folder)


if __name__ == "__main__":
    draw()
