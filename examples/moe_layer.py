"""A mixture of experts as a PartialLayer: router and combine in graphs, experts eager. Runs on a GPU or on the CPU tape.

python examples/moe_layer.py
"""

import torch
from torch import nn

import graphcap
from graphcap import EAGER, GRAPHED
from graphcap.testing import compare, deterministic


class MoE(graphcap.PartialLayer):
    inputs, outputs = "hidden", "hidden"

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                  for _ in range(experts))

    def parts(self):
        return (
            GRAPHED("route", "hidden -> rows, counts, weight, back"),
            EAGER("run_experts", "rows, counts -> done", reason="rows per expert depend on the data"),
            GRAPHED("combine", "done, weight, back, hidden -> hidden"),
        )

    def route(self, hidden):
        """The best expert of every token; tokens sorted by expert. Static shapes: one row per token."""
        normed = self.norm(hidden)
        probs = self.router(normed).softmax(-1)
        weight, expert = probs.max(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        counts = (expert == torch.arange(probs.shape[-1], device=hidden.device)).sum(0)
        return normed[order], counts, weight, order.argsort()

    def run_experts(self, rows, counts):
        pieces = rows.split(counts.tolist())  # a host read: this is why the part is eager
        return torch.cat([mlp(piece) for mlp, piece in zip(self.mlps, pieces, strict=True)])

    def combine(self, done, weight, back, hidden):
        return hidden + done[back] * weight


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = lambda: (MoE().to(device), MoE().to(device))  # noqa: E731
    batches = torch.randn(20, 128, 64, device=device)
    with deterministic(device):
        graphed = graphcap.capture(layers(), (batches[0],))
        print(graphed.plan)  # 2 breaks, 3 graphs: the end of layer 0 and the start of layer 1 are one
        adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)  # noqa: E731
        print(compare(layers, lambda step: ((batches[step],), {}), steps=20, optimizer=adam))


if __name__ == "__main__":
    main()
