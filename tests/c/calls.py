"""Calls of a built library beside a stand-in for the driver, in a process of their own: reads what to do from standard input,
as JSON, and prints what came of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys

MOST_PARAMETERS = 96
COUNTS = ("load", "graph", "set", "destroy")


class Record(ctypes.Structure):
    """`record` in fake_driver.c."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("image", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid", "block", "shared", "attributes", "attribute", "graph")),
        ("stream", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("values", ctypes.c_uint64 * MOST_PARAMETERS),
    )


def laid_out(args: ctypes.Structure, struct_size: int | None) -> ctypes.Structure:
    """The struct, or its first `struct_size` bytes, in front of bytes that are not zero."""
    whole = ctypes.sizeof(args)
    args.struct_size = whole if struct_size is None else struct_size
    content = bytes(args)[: max(args.struct_size, 8)]
    return type(args).from_buffer(bytearray(content.ljust(whole + 64, b"\xff")))


def main() -> None:
    task = json.load(sys.stdin)
    # loaded first under the name libcuda.so.1, it is what the library finds
    driver = ctypes.CDLL(task["driver"], mode=ctypes.RTLD_GLOBAL)
    for name in task["settings"]:
        setting = task["settings"][name]
        if isinstance(setting, str):
            (ctypes.c_char * 256).in_dll(driver, name).value = setting.encode()
        else:
            ctypes.c_int.in_dll(driver, name).value = setting
    found = importlib.util.spec_from_file_location("bindings", task["bindings"])
    bindings = importlib.util.module_from_spec(found)
    found.loader.exec_module(bindings)
    library = bindings.Library(task["library"])
    outcomes = [None] * len(task["calls"])

    def call(i: int) -> None:
        """Repeats one call; its last status and message."""
        wanted = task["calls"][i]
        kind = bindings.DecodeArgs if "decode" in wanted["op"] else bindings.PrefillArgs
        args = None if wanted["args"] is None else laid_out(kind(**wanted["args"]), wanted.get("struct_size"))
        function = getattr(library.functions, f"fd_{wanted['op']}")
        given, found = None if args is None else ctypes.byref(args), ctypes.c_size_t()
        second = wanted.get("stream", 0)
        if wanted["op"].endswith("_workspace"):
            second = None if wanted.get("no_result") else ctypes.byref(found)
        if "context" in wanted:
            driver.fake_use_context(wanted["context"])
        statuses = {function(given, second) for _ in range(wanted.get("repeats", 1))}
        if wanted.get("destroys"):
            driver.fake_destroy_context(wanted["context"])
        message = library.functions.fd_last_error().decode()
        names = sorted(bindings.STATUS[status] for status in statuses)
        outcomes[i] = {"status": ", ".join(names), "message": message, "bytes": found.value}

    for i in range(len(outcomes)):
        call(i)
    launches, counts = [], dict.fromkeys(COUNTS, 0)
    if hasattr(driver, "fake_launch_count"):
        count = ctypes.c_int.in_dll(driver, "fake_launch_count").value
        counts = {name: ctypes.c_int.in_dll(driver, f"fake_{name}_count").value for name in COUNTS}
        records = (Record * 4096).in_dll(driver, "fake_launches")
        for record in records[: min(count, 4096)]:
            one = {
                name: getattr(record, name) for name, _ in Record._fields_ if name not in ("name", "count", "values")
            }
            launches.append(one | {"name": record.name.decode(), "values": list(record.values[: record.count])})
    print(json.dumps({"outcomes": outcomes, "launches": launches, "counts": counts}))


if __name__ == "__main__":
    main()
