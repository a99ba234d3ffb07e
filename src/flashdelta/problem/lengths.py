"""Calls that differ in nothing but their numbers of tokens are validated once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import Made
from .operations import Operation
from .problem import FAMILIES, Problem, make_frozen, replaced

MOST = 1024
"""Kinds of calls that are known of an operation."""


class Lengths:
    """The kinds of calls, apart from their numbers of tokens, that keep an operation's rules. `names`: of its tensors."""

    def __init__(self, operation: Operation, names: Sequence[str]):
        self.operation, self.names = operation, names
        self.known: dict[tuple | None, tuple[Problem, list[str], dict[str, torch.Size]]] = {}
        """Records by kind, of the call that was validated: its problem, the roles of its tensors, and shapes of those that are
        views of the caller's."""

    def check(self, given: Mapping[str, Any], options: tuple | None, dry: bool) -> Made:
        """`Operation.check`, once for each kind: other calls of it have the first one's problem, but for T. Whether their
        tensors overlap is left to `Plan.execute`. `options`: of a call that the launch cache may keep, with all else that rules
        may depend on; None for other calls, which are always validated."""
        kind = self.kind(given, options)
        known = self.known.get(kind)
        if known is None:
            problem, t = made = self.operation.check(given, dry=dry)
            if kind is not None:
                if len(self.known) >= MOST:
                    self.known.clear()
                present = t.present()
                views = {role: x.shape for role, x in present.items() if x is not given[role]}
                self.known[kind] = problem, [*present], views
            return made
        problem, roles, views = known
        tensors, T = FAMILIES[type(problem)], given[self.operation.by_token[0]].shape[1]
        present = {role: given[role] for role in roles}
        present |= {role: given[role].view(shape) for role, shape in views.items()}
        made = replaced(problem, T=T), make_frozen(tensors, dict.fromkeys(tensors.__dataclass_fields__) | present)
        self.operation.check_values(made, given, dry)
        return made

    def kind(self, given: Mapping[str, Any], options: tuple | None) -> tuple | None:
        """All that the rules ask of a call, but its number of tokens. None for a call of which they may ask more."""
        by_token = self.operation.by_token
        if options is None or not by_token or any([given[name] is not None for name in self.operation.ask_length]):
            return None
        found, lengths = [*options], set[int]()
        for name in self.names:
            x: Tensor | None = given[name]
            if x is None or name not in by_token:
                found.append(x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad))
            elif x.dim() > 1 and x.is_contiguous():
                B, T, *others = x.shape
                lengths.add(T)
                found.append((B, *others, x.dtype, x.get_device(), x.requires_grad))
            else:
                return None
        return tuple(found) if len(lengths) == 1 else None
