"""Two pipeline chunks of one rank under an interleaved order: forward and backward step by step, as a schedule calls them.

python examples/pipeline.py
"""

import torch
from torch import nn

import graphcap
from graphcap import Order, Phase


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunks = tuple(nn.Sequential(nn.Linear(32, 32), nn.Tanh()).to(device) for _ in range(2))
    order = Order.interleaved(pp_rank=0, pp_size=2, chunks=2, microbatches=4)
    sample = torch.randn(16, 32, device=device)
    graphed = graphcap.capture(
        chunks, ((sample,), (sample.clone().requires_grad_(),)), order=order  # chunk 1's input comes with a gradient
    )
    print(graphed.plan)  # which microbatches share buffers
    optimizer = torch.optim.SGD(graphed.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses, hidden, gradients = [], {}, {}
        for place in order:  # here both chunks are in this process; else a send and a receive stand between them
            key = place.microbatch
            if place.phase is Phase.F and place.chunk == 0:
                hidden[key] = graphed.forward(place, torch.randn(16, 32, device=device)).detach().requires_grad_()
            elif place.phase is Phase.F:
                output = graphed.forward(place, hidden[key])
                loss = output.square().mean()
                (gradients[1, key],) = torch.autograd.grad(loss, output)
                losses.append(loss.detach())
            elif place.chunk == 1:
                (gradients[0, key],) = graphed.backward(place, gradients.pop((1, key)))
            else:
                graphed.backward(place, gradients.pop((0, key)))
        optimizer.step()
        print(f"step {step}: loss {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    main()
