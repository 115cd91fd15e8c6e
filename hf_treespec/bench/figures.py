"""Figures with matplotlib, which the `bench` extra brings along."""

from typing import Any


def require_matplotlib() -> None:
    """Raises an `ImportError` that names the extra where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("Plots need matplotlib: `pip install 'hf-treespec[bench]'`, or `--no-plots`.") from error


def new_figure(rows: int, columns: int, title: str):
    """A figure of `rows` x `columns` panels that needs no display, and its axes as nested lists."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * columns, 0.6 + 3.2 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Names a panel and its axes, and what is drawn where that has names."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
