"""A plan as a picture: keys by rank, loads, rows that travel. Uses matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_splitkv.plan import Plan, travelling_rows

MAX_DOCUMENTS = 60  # bars drawn, the longest documents
MAX_LABELS = 16


def plot_plan(plan: Plan, before: Sequence[int], path: Path) -> None:
    """Draws a plan to a file whose suffix names the format.

    Args:
        plan: what to draw.
        before: pairs of each rank under a contiguous placement, for comparison.
        path: of the picture.
    Raises:
        ValueError: matplotlib is not installed, or it knows no such format.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}); pip install matplotlib") from None
    colours = plt.get_cmap("turbo")(np.linspace(0.03, 0.97, plan.cp_size))
    figure, (documents, loads, traffic) = plt.subplots(
        1, 3, figsize=(15, 5), width_ratios=(2.2, 1.2, 1.2), layout="constrained"
    )
    order = np.argsort(-np.asarray(plan.doc_lens), kind="stable")[:MAX_DOCUMENTS]
    line_of = {int(doc): line for line, doc in enumerate(order)}
    for rank, doc, begin, end in plan.runs.tolist():
        if doc in line_of:
            documents.barh(
                line_of[doc], end - begin, left=begin, height=0.9, color=colours[rank], linewidth=0
            )
    documents.invert_yaxis()
    documents.set(
        title=f"keys by rank, {len(order)} of {len(plan.doc_lens)} documents",
        xlabel="position in the document, tokens",
        ylabel="document, longest first",
    )
    ranks = np.arange(plan.cp_size)
    loads.bar(ranks - 0.2, before, width=0.4, color="0.75", label="contiguous")
    loads.bar(ranks + 0.2, plan.costs, width=0.4, color=colours, label="planned")
    loads.axhline(sum(plan.costs) / plan.cp_size, color="black", linewidth=0.8, label="mean")
    loads.set(title="visible pairs by rank", xlabel="rank", ylabel="pairs")
    loads.legend(fontsize="small")
    name = "keys" if plan.route == "keys" else "query rows"
    image = traffic.imshow(travelling_rows(plan), cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=traffic, shrink=0.8, label=name)
    traffic.set(title=f"{name} that travel", xlabel="to rank", ylabel="from rank")
    for axis in (documents.yaxis, loads.xaxis, traffic.xaxis, traffic.yaxis):
        axis.get_major_locator().set_params(integer=True, nbins=MAX_LABELS)
    try:
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)
