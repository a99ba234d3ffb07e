"""Calls libflashdelta.so from Python through ctypes. Needs nothing but the standard library: `flashdelta export` leaves a copy
of this file beside the C sources. The structs and functions are flashdelta.h's, which says what they mean.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p

STATUS = (
    *("SUCCESS", "ERROR_STRUCT", "ERROR_NULL_POINTER", "ERROR_SIZE", "ERROR_UNSUPPORTED", "ERROR_OPTION"),
    *("ERROR_ALIGNMENT", "ERROR_WORKSPACE", "ERROR_NOT_EXPORTED", "ERROR_ARCHITECTURE", "ERROR_DRIVER", "ERROR_CUDA"),
)
"""`fd_status`, by number."""

GATES = ("none", "logsigmoid")
"""`fd_gate`, by number."""

PRECISIONS = ("default", "tf32x3", "ieee")
"""`fd_precision`, by number."""


class _Sized(Structure):
    """A struct that starts with its own size, which is filled in here."""

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class PrefillArgs(_Sized):
    """`fd_prefill_args`. Pointers are numbers, as `Tensor.data_ptr()` gives them."""

    _fields_ = (
        ("struct_size", c_size_t),
        *((name, c_int64) for name in ("B", "H", "T")),
        *((name, c_int32) for name in ("K", "V", "C", "gate", "precision")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "initial_state")),
        *((name, c_void_p) for name in ("o", "w", "u", "final_state", "workspace")),
        ("workspace_bytes", c_size_t),
    )


class DecodeArgs(_Sized):
    """`fd_decode_args`."""

    _fields_ = (
        ("struct_size", c_size_t),
        *((name, c_int64) for name in ("N", "H", "slots")),
        *((name, c_int32) for name in ("K", "V", "gate")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "states")),
        ("slot_pitch", c_int64),
        *((name, c_void_p) for name in ("state_indices", "o")),
    )


class FlashdeltaError(RuntimeError):
    """A call that did not succeed; `status` is one of `STATUS`."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Library:
    """A built library. `functions` holds the C functions themselves, which return a status as a number."""

    def __init__(self, path: str) -> None:
        self.functions = functions = ctypes.CDLL(path)
        for name in ("fd_last_error", "fd_version", "fd_status_string"):
            getattr(functions, name).restype = c_char_p
        functions.fd_status_string.argtypes = (ctypes.c_int,)
        for dtype in ("f32", "bf16"):
            getattr(functions, f"fd_prefill_{dtype}").argtypes = (POINTER(PrefillArgs), c_void_p)
            getattr(functions, f"fd_prefill_{dtype}_workspace").argtypes = (POINTER(PrefillArgs), POINTER(c_size_t))
        functions.fd_decode_bf16.argtypes = (POINTER(DecodeArgs), c_void_p)
        self.version = functions.fd_version().decode()

    def check(self, status: int) -> None:
        """Raises a FlashdeltaError with the library's own words if a call failed."""
        if status != 0:
            raise FlashdeltaError(STATUS[status], self.functions.fd_last_error().decode())

    def workspace_bytes(self, args: PrefillArgs, dtype: str = "f32") -> int:
        found = c_size_t()
        self.check(getattr(self.functions, f"fd_prefill_{dtype}_workspace")(ctypes.byref(args), ctypes.byref(found)))
        return found.value

    def prefill(self, args: PrefillArgs, stream: int = 0, dtype: str = "f32") -> None:
        """`fd_prefill_f32`, or `fd_prefill_bf16`; `stream` is a `CUstream` as a number."""
        self.check(getattr(self.functions, f"fd_prefill_{dtype}")(ctypes.byref(args), stream))

    def decode(self, args: DecodeArgs, stream: int = 0) -> None:
        """`fd_decode_bf16`."""
        self.check(self.functions.fd_decode_bf16(ctypes.byref(args), stream))
