"""Process groups, by name and by what a process has of them."""

from __future__ import annotations

from typing import Any

import torch

from .errors import wrong


def is_group(x: object) -> bool:
    # not a tuple of kinds, in which torch.compile does not find a group's
    return torch.distributed.is_available() and isinstance(x, torch.distributed.ProcessGroup)


def members(group: Any, name: str = "group") -> tuple[str, int, int]:
    """A process group's name, this process' rank in it, and how many ranks it has. `name`: the argument's."""
    if not is_group(group):
        if torch.distributed.is_available() and group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise wrong(name, "a group that this process is not in", "one of its own")
        wanted = "a torch.distributed.ProcessGroup (of a DeviceMesh: its get_group())"
        raise TypeError(f"{name}: got {type(group).__name__}, wanted {wanted}")
    if not torch.compiler.is_compiling():
        check_alive(group, group.group_name, name)
    return group.group_name, group.rank(), group.size()


def check_alive(group: Any, name: str, argument: str) -> None:
    """That a group has its name still: a later one may have got it."""
    if group is not group_named(name, argument):
        raise wrong(argument, f"a process group that was destroyed, and a later one has its name ({name!r})", LIVING)


def group_named(name: str, argument: str = "group") -> Any:
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, KeyError, ValueError):
        raise wrong(argument, f"a process group that was destroyed (its name was {name!r})", LIVING) from None


LIVING = "one that there is"
