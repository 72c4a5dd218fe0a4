"""Layers whose forward asks Python for numbers: of the choice of experts, which is known, and of more than that."""

import torch
from torch import Tensor, nn

from tests.experts.lists import Expert, Hit, Where
from tests.experts.models import EXPERTS, WIDTH


class Steps(Where):
    """A branch on an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if self.steps > 3 else out


class Flag(Where):
    """A branch on a buffer that holds a truth value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.ready else 1)


class Temperature(Where):
    """A branch on the sign of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(-3.0))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.temperature > 0 else -out


class Scaled(Where):
    """A parameter as a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.item()


class Listing(Scaled):
    """A parameter as a list of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return Where.forward(self, x) * self.scale.tolist()[0]


class Array(Scaled):
    """A parameter as an array."""

    def forward(self, x: Tensor) -> Tensor:
        return Where.forward(self, x) * float(self.scale.detach().numpy()[0])


class Equal(Scaled):
    """Two tensors compared by an op that gives a truth value."""

    def forward(self, x: Tensor) -> Tensor:
        out = Where.forward(self, x)
        return out if torch.equal(self.scale, torch.ones(1)) else out * 2


class Capacity(Scaled):
    """Tokens of an expert beyond a number that a parameter says are dropped."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out, most = torch.zeros_like(t), int(self.scale * 80)
        for e, expert in enumerate(self.experts):
            token, slot = (i == e).nonzero(as_tuple=True)
            token, slot = token[:most], slot[:most]
            out.index_add_(0, token, expert(t[token]) * w[token, slot, None])
        return out


class Sure(Where):
    """A branch on how sure the router is."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = super().dispatch(t, w, i)
        return out * 2 if w.max() < 0.8 else out


class Auxiliary(Where):
    """A branch on a balance loss."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        share = self.router(t).softmax(-1).mean(0)
        out = super().dispatch(t, w, i)
        return out * 2 if EXPERTS * (share**2).sum() > 1 else out


class Early(Where):
    """Nothing is computed where all weights are 0."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return t if w.sum() == 0 else super().dispatch(t, w, i)


class Threshold(Where):
    """Tokens whose weight is small are left out: how many there are depends on the weights."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            token, slot = ((i == e) & (w > 0.1)).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(t[token]) * w[token, slot, None])
        return out


class Lucky(Where):
    """A branch on a random number of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if torch.rand(()) < 0.999 else out * 2


class FirstToken(Where):
    """A branch on which expert one token chose: no record needs to have chosen that one."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = super().dispatch(t, w, i)
        return out * 2 if i[0, 0] == 2 else out


class FirstNumber(FirstToken):
    """The same, with a number that Python compares."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = Where.dispatch(self, t, w, i)
        return out * 2 if int(i[0, 0]) == 2 else out


class Crowded(Where):
    """A branch on how many tokens an expert has."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = super().dispatch(t, w, i)
        return out * 2 if (i == 1).sum() > len(t) // 2 else out


class Forgotten(Where):
    """A branch on whether an expert has tokens."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = super().dispatch(t, w, i)
        return out if (i == 1).any() else out * 2


class Another(Where):
    """A branch on a choice that is not that of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, EXPERTS)

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = super().dispatch(t, w, i)
        return out if (self.other(t).argmax(-1) == 1).any() else out * 1.0


class Any(Where):
    """Experts without tokens are passed over, asked in four ways; all choices count, which is asked, too."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out, counts = torch.zeros_like(t), torch.bincount(i.view(-1), minlength=EXPERTS)
        assert counts.sum() == i.numel()
        for e, expert in enumerate(self.experts):
            mask = i == e
            if not mask.any() or mask.sum().item() == 0 or int(counts[e]) == 0 or e not in i:
                continue
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(t[token]) * w[token, slot, None])
        return out


class Unique(Where):
    """A loop over the experts that were chosen, by their numbers."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = torch.zeros_like(t)
        for e in i.unique():
            token, slot = torch.where(i == e)
            out.index_add_(0, token, self.experts[e](t[token]) * w[token, slot, None])
        return out


class Greater(Where):
    """The loop of newer Mixtrals, over the numbers of the experts that were hit."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out, mask = torch.zeros_like(t), torch.nn.functional.one_hot(i, EXPERTS).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[e](t[token]) * w[token, slot, None])
        return out


class ByToken(Where):
    """One token after the other."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        rows = []
        for n in range(len(t)):
            rows.append(sum(w[n, j] * self.experts[i[n, j]](t[n : n + 1]) for j in range(self.k)))
        return torch.cat(rows)


class Clipped(Where):
    """Small weights are 0, chosen by a tensor."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return super().dispatch(t, torch.where(w > 0.4, w, 0.0), i)


class Step(Where):
    """A layer that reads a number of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) / (1 + self.number)


class Numbered(nn.Sequential):
    """Layers whose numbers differ."""

    def __init__(self) -> None:
        super().__init__(*map(Step, range(4)))


class Everyone(Any):
    """Every token chooses all experts."""

    def __init__(self) -> None:
        super().__init__(k=EXPERTS)


class Whole(Where):
    """Weights are whole numbers."""

    def route(self, t: Tensor) -> tuple[Tensor, Tensor]:
        best = (8 * self.router(t)).topk(self.k, -1)
        return best.values, best.indices

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(i == e)
            out.index_add_(0, token, expert(t[token]) * w[token, slot, None].long())
        return out


class WholeAtOnce(Whole):
    """The same, before they are taken apart."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return Where.dispatch(self, t, w.long(), i)


class Broken(Where):
    """Divides by the number of tokens that an expert does not have."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return super().dispatch(t, w, i) * (1 / int((i == EXPERTS).sum()))


class Many(Hit):
    """Many experts, one of which is chosen."""

    def __init__(self) -> None:
        super().__init__(k=1)
        self.router = nn.Linear(WIDTH, 12)
        self.experts = nn.ModuleList([Expert() for _ in range(12)])


class Counting(Where):
    """Calls are counted in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Biased(Hit):
    """Experts are chosen by scores with a bias for balance and weighted by those without it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tensor([0.9, -0.3, 0.0, 0.4]))

    def route(self, t: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(t)
        plain = scores.topk(self.k, -1).indices
        chosen = (scores + self.bias).topk(self.k, -1).indices
        self.agree = (plain == chosen).float().mean()
        return scores.softmax(-1).gather(1, chosen), chosen
