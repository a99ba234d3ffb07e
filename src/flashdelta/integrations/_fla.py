"""FLA (flash-linear-attention) 0.5 and 0.6 on flashdelta: its KDA functions, and with them its models, NeMo's, and those of
Hugging Face that take `chunk_kda` from it.

FLA asks its registered backends before every call: a verifier says whether a backend takes it. Ours takes calls all of whose
arguments it knows and a kernel supports; FLA runs the others. On a CPU, where FLA has nothing to run, the reference takes them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any

import torch

from .. import chunk_kda, fused_recurrent_kda, kernels
from ..backends import KERNEL
from ..problem import switches
from ..runtime.call import public_call
from . import Status, packing
from .patches import Patches

ENVIRONMENT = "FLA_FLASHDELTA"
"""`FLA_FLASHDELTA=0` turns the integration off. Read at every call, as FLA reads its own switches."""

READ = ("0.5.0", "0.5.1", "0.5.2", "0.6.0")
"""Versions that this was written and tested against. Others run if their signatures are those of these."""

DISTRIBUTIONS = ("fla-core", "flash-linear-attention")
"""Releases are two packages, of which the first has the kernels. An installation from FLA's repository is the second alone."""

DISPATCH_OFF = "FLA_DISABLE_BACKEND_DISPATCH=1"

GATE_ARGUMENTS = ("A_log", "dt_bias", "lower_bound")
"""FLA reads them with `use_gate_in_kernel` alone."""

PRIORITY = 2
"""Lower comes first; FLA's own backends have 3 and more."""


class Unfit(ValueError):
    """Why FLA keeps a call, or why a call on a CPU runs nowhere."""


@dataclass(eq=False)
class Adapter:
    """How calls of a function of FLA's become calls of ours.

    `taken`: FLA's arguments that ours has, by its names. `renamed`: the same under another name. `ignored`: what only FLA's
    kernels need. `constant`: what only ours needs. An argument that is None counts as left out, and one that is in none of
    these leaves the call to FLA.
    """

    op: Callable[..., Any]
    taken: frozenset[str]
    ignored: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] = lambda call, given: None
    """Why FLA keeps a call, of our arguments and FLA's."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """FLA's that are neither None nor False, and mean the same here."""

    parameters: tuple[str, ...] = ()
    """FLA's, in its order, as installed."""

    def read(self, function: Callable[..., Any]) -> str | None:
        """Takes over the signature of FLA's function, or says how it differs from those that were read."""
        parameters = inspect.signature(function).parameters.values()
        named = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        strange = named.keys() - self.taken - self.ignored - self.renamed.keys() - UNTAKEN
        other = {name for name, x in named.items() if not self.is_default(name, x)}
        if missing := REQUIRED - named.keys():
            return f"{function.__name__} lacks {', '.join(sorted(missing))}"
        if strange or other:
            found = (f"{name}={named[name]!r}" if name in other else name for name in sorted(strange | other))
            return f"{function.__name__} has parameters {', '.join(found)}"
        self.parameters = tuple(named)
        return None

    def is_default(self, name: str, x: object) -> bool:
        """Whether FLA's default of a parameter, if there is one, means what is left out here."""
        known = self.defaults.get(name)
        if known is None:
            return x is None or x is False or x is inspect.Parameter.empty
        return type(x) is type(known) and x == known

    def fit(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Our arguments."""
        given = dict(zip(self.parameters, arguments)) | dict(named) if arguments else named
        if len(given) != len(arguments) + len(named):
            twice = sorted(named.keys() & {*self.parameters[: len(arguments)]})
            what = f"multiple values for argument {twice[0]!r}" if twice else f"{len(arguments)} positional arguments"
            raise TypeError(f"{self.op.__name__}() got {what}")
        call: dict[str, Any] = {"backend": KERNEL, **self.constant}
        for name, x in given.items():
            if x is None or name in self.ignored:
                continue
            ours = name if name in self.taken else self.renamed.get(name)
            if ours is None or ours in call:
                raise Unfit(f"{name}: flashdelta.{self.op.__name__} has no such argument")
            call[ours] = x
        if not call.get("use_gate_in_kernel"):
            for name in GATE_ARGUMENTS:
                call.pop(name, None)
        if "cp_context" in call:  # whose offsets count
            for name in ("cu_seqlens", HOST_OFFSETS):
                call.pop(name, None)
        reason = self.refusal(call, given)
        if reason is not None:
            raise Unfit(reason)
        return call

    def verify(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[bool, str | None]:
        """FLA's question: whether we take the call, and why not. On a CPU, where FLA has no kernels, we take every call: one
        that we refuse ends in our reason."""
        try:
            why = public_call(self.op).refusal(self.fit(arguments, named))
        except (Unfit, TypeError) as reason:
            why = str(reason)
        ok = why is None or is_on_cpu(*arguments, *named.values())
        return ok, None if ok else why


HOST_OFFSETS = "cu_seqlens_cpu"


def is_on_cpu(*arguments: Any) -> bool:
    """Whether there are tensors, and all lie there."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    return bool(tensors) and all(x.is_cpu for x in tensors)


def chunk_refusal(call: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """What FLA itself refuses, with messages of its own."""
    state = call.get("initial_state")
    if isinstance(state, torch.Tensor) and state.dtype == torch.bfloat16:
        return "initial_state: bfloat16; FLA takes float32"
    if call.get("safe_gate") and call.get("use_gate_in_kernel") and "lower_bound" not in call:
        return "safe_gate: True with a gate that has no lower_bound"
    if call.get("return_intermediate_states"):
        if not torch.is_inference_mode_enabled():
            return "return_intermediate_states: True outside of inference mode"
        if given.get("use_graph") and "cu_seqlens" in call:
            return "use_graph: True with return_intermediate_states and cu_seqlens; FLA's h then has rows for chunks to come"
    if given.get("use_graph") and "cp_context" in call:
        return "use_graph: True with cp_context; FLA's context then counts ranks on the device"
    return None


def recurrent_refusal(call: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    # FLA's default is to write into initial_state
    return "inplace_final_state: True" if given.get("inplace_final_state", True) else None


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


REQUIRED = words("q k v g beta scale cu_seqlens")
COMMON = """q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
    use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens A_log dt_bias"""
OLD_NAMES = {"transpose_state_layout": "state_v_first"}
UNTAKEN = words("cp_context ssm_state_indices num_accepted_tokens")
"""FLA's arguments that leave a call to it, unless they are None."""

CHUNK = Adapter(
    chunk_kda,
    words(f"{COMMON} safe_gate disable_recompute return_intermediate_states cu_seqlens_cpu chunk_size cp_context"),
    # every launch of ours can be captured, with any number of sequences
    ignored=words("use_graph max_num_seqs"),
    renamed=OLD_NAMES,
    refusal=chunk_refusal,
    defaults={"chunk_size": 64},
)
RECURRENT = Adapter(
    fused_recurrent_kda,
    words(f"{COMMON} out"),
    ignored=words("inplace_final_state"),
    renamed=OLD_NAMES,
    refusal=recurrent_refusal,
    defaults={"inplace_final_state": True},
)
WY = Adapter(
    kernels.chunk_bwd_wy_dqkg,
    words("q k v v_new g beta A h do dh dv scale state_v_first cu_seqlens chunk_size"),
    ignored=words("chunk_indices chunk_offsets use_graph"),
    renamed=OLD_NAMES,
    constant={"use_exp2": True},
    defaults={"chunk_size": 64},
)


def run_chunk(*arguments: Any, **named: Any) -> Any:
    call = CHUNK.fit(arguments, named)
    if call.get("return_intermediate_states") and "cu_seqlens" in call and "cu_seqlens_cpu" not in call:
        # FLA's h has a row for each chunk there is, which only the host can tell
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    return chunk_kda(**call)


def run_recurrent(*arguments: Any, **named: Any) -> Any:
    call = RECURRENT.fit(arguments, named)
    if "initial_state" in call:
        call["initial_state"] = call["initial_state"].float()  # FLA returns float32 whatever it gets
    return fused_recurrent_kda(**call)


def run_wy(*arguments: Any, **named: Any) -> Any:
    return kernels.chunk_bwd_wy_dqkg(**WY.fit(arguments, named))


# ---- in FLA's registries ------------------------------------------------------------------------------------------------


def unlike(base: Any) -> list[str]:
    """How FLA's base class of backends differs from those that were read. A question by another name would never reach ours."""
    missing = [name for name in ("is_available", "is_enabled", "verify") if not hasattr(base, name)]
    if missing:
        return [f"BaseBackend lacks {', '.join(missing)}"]
    parameters = inspect.signature(base.verify).parameters
    _, _, *rest = kinds = [p.kind.name for p in parameters.values()]
    if len(kinds) == 4 and rest == ["VAR_POSITIONAL", "VAR_KEYWORD"]:
        return []
    return [f"BaseBackend.verify has parameters {', '.join(parameters)}"]


def backend_class(base: type) -> type:
    """Our backend, derived from FLA's base class."""

    class FlashDelta(base):  # type: ignore[misc]
        """KDA by flashdelta."""

        backend_type = package_name = "flashdelta"
        env_var = ENVIRONMENT
        priority = PRIORITY

        @classmethod
        def is_available(cls) -> bool:
            return True

        @classmethod
        def is_enabled(cls) -> bool:
            return is_on()

        def verify(self, function_name: str, *arguments: Any, **named: Any) -> tuple[bool, str | None]:
            adapter = ADAPTERS.get(function_name)
            return (False, "not ours") if adapter is None else adapter.verify(arguments, named)

        chunk_kda = staticmethod(run_chunk)
        fused_recurrent_kda_fwd = staticmethod(run_recurrent)
        chunk_kda_bwd_wy_dqkg_fused = staticmethod(run_wy)

    return FlashDelta


ADAPTERS = {"chunk_kda": CHUNK, "fused_recurrent_kda_fwd": RECURRENT, "chunk_kda_bwd_wy_dqkg_fused": WY}


class _State:
    """Of this process."""

    enabled = False
    registered = False
    obstacle: str | None = None
    warned: bool = False
    patches = Patches()


def is_enabled() -> bool:
    """By this process, whatever the environment says."""
    return _State.enabled


def is_on() -> bool:
    return _State.enabled and not is_forbidden()


def is_forbidden() -> bool:
    return not switches.is_on(ENVIRONMENT, True)


def enable() -> None:
    """Lets FLA's calls run on flashdelta. Where FLA is not what this was read against, warns once and does nothing.

    Raises:
        ImportError: FLA is not installed.
    """
    _prepare()
    if _State.obstacle is not None:
        _warn(_State.obstacle)
    elif not _State.enabled:
        _patch_device_context()
        for name in GENERATION:
            _State.patches.when_imported(name, _refuse_generation)
        if util.find_spec("transformers") is not None:
            packing.patch(_State.patches, is_on)
        if torch.__version__ < (2, 12) and not is_forbidden():
            _State.patches.when_imported(TRANSFORMERS, _correct)
        _State.enabled = True


def disable() -> None:
    """Leaves every call to FLA again."""
    _State.enabled = False
    _State.patches.restore()


def _warn(difference: str) -> None:
    """Once."""
    if not _State.warned:
        _State.warned = True
        known = f"it was written for {', '.join(READ)}"
        warnings.warn(f"flashdelta leaves all of FLA {version()} as it is ({known}): {difference}", stacklevel=3)


def status() -> Status:
    """Where the integration stands. Imports FLA, and turns nothing on."""
    if not is_installed():
        return Status("fla", "not installed", None, "pip install flash-linear-attention")
    try:
        _prepare()
    except Exception as error:  # FLA's own, such as a Triton that it does not run with
        return Status("fla", "unknown version", version(), f"its import fails: {error}")
    found = version()
    if _State.obstacle is not None:
        return Status("fla", "off" if _State.obstacle == DISPATCH_OFF else "unknown version", found, _State.obstacle)
    if is_forbidden():
        return Status("fla", "off", found, f"{ENVIRONMENT}={os.environ[ENVIRONMENT]}")
    broken = _generation_obstacle()
    note = "" if broken is None else f"; {broken}: refused"
    if _State.enabled:
        return Status("fla", "active", found, f"replaces {', '.join(ADAPTERS)}{note}")
    return Status("fla", "possible", found, f"import flashdelta.integrations.fla{note}")


GENERATION = ("fla.models.generation_utils", "fla.models.utils")
"""Where FLA has its models' `FLAGenerationMixin`: 0.6, and 0.5."""


def _generation_obstacle() -> str | None:
    """Why FLA's own models can't generate with the transformers that is there."""
    for name in GENERATION:
        with suppress(ImportError):
            mixin = getattr(import_module(name), "FLAGenerationMixin", None)
            if mixin is not None:
                return generation_obstacle(mixin)
    return None


def generation_obstacle(mixin: Any) -> str | None:
    """Why models of FLA, whose class of generation this is, can't generate with a cache, or None: from 5.24 on, transformers
    passes it as `cache`, where they read `past_key_values`, and every token would begin with an empty one."""
    theirs, base = (inspect.signature(x.prepare_inputs_for_generation).parameters for x in (mixin, mixin.__mro__[1]))
    if "cache" not in base or "cache" in theirs:
        return None
    version = metadata.version("transformers")
    return f"FLA's own models can't generate with a cache with transformers {version} (before 5.24 they can)"


def _refuse_generation(module: ModuleType) -> None:
    """Lets FLA's models refuse what they would generate wrongly."""
    mixin = vars(module).get("FLAGenerationMixin")
    if mixin is None or mixin.__module__ != module.__name__ or (reason := generation_obstacle(mixin)) is None:
        return
    theirs = mixin.prepare_inputs_for_generation

    @functools.wraps(theirs)
    def prepare_inputs_for_generation(*arguments: Any, **named: Any) -> Any:
        if named.get("use_cache", True):
            ways = "pip install 'transformers<5.24', pass use_cache=False, or use the model of transformers"
            raise RuntimeError(f"{reason}: {ways}")
        return theirs(*arguments, **named)

    _State.patches.set(mixin, theirs.__name__, prepare_inputs_for_generation)


def is_installed() -> bool:
    """A folder of that name without a package in it does not count."""
    return "fla" in sys.modules or getattr(util.find_spec("fla"), "origin", None) is not None


def version() -> str | None:
    """As installed, or what a source tree on the path says once it is imported."""
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return getattr(sys.modules.get("fla"), "__version__", None)


def _prepare() -> None:
    """Registers our backend, which takes no call before it is enabled; or notes what is in the way."""
    if _State.registered or _State.obstacle is not None:
        return
    import_module("fla")
    try:
        functions = {name: getattr(import_module(f"fla.ops.kda.{where}"), name) for where, name in SEAMS}
        differences = [difference for name, f in functions.items() if (difference := ADAPTERS[name].read(f))]
        registry = import_module(import_module("fla.ops.kda.chunk").dispatch.__module__)
        differences += unlike(registry.BaseBackend)
        if registry._DISPATCH_DISABLED:
            differences = [DISPATCH_OFF]
        if not differences:
            _register(functions["chunk_kda"], registry)
    except Exception as error:  # whatever another version does otherwise
        differences = [f"{type(error).__name__}: {error}"]
    _State.obstacle = "; ".join(differences) or None
    _State.registered = not differences


SEAMS = (
    ("chunk", "chunk_kda"),
    ("fused_recurrent", "fused_recurrent_kda_fwd"),
    ("chunk_bwd", "chunk_kda_bwd_wy_dqkg_fused"),
)
"""Files of `fla.ops.kda`, and functions in them."""


def _register(function: Callable[..., Any], registry: Any) -> None:
    backend = backend_class(registry.BaseBackend)
    if hasattr(registry, "register"):
        registry.register(function)(backend)
        registry.register("kda")(backend)
    else:
        _register_by_operation(backend())


def _register_by_operation(backend: object) -> None:
    """With FLA 0.5, which has one registry an operation, and asks none for `fused_recurrent_kda_fwd`."""
    import_module("fla.ops.kda.backends").kda_registry.register(backend)
    module = import_module("fla.ops.kda.fused_recurrent")
    theirs = module.fused_recurrent_kda_fwd

    def fused_recurrent_kda_fwd(*arguments: Any, **named: Any) -> Any:
        takes = is_on() and RECURRENT.verify(arguments, named)[0]
        return (run_recurrent if takes else theirs)(*arguments, **named)

    setattr(module, theirs.__name__, fused_recurrent_kda_fwd)


TRANSFORMERS = "transformers.integrations.hub_kernels"
"""Where it chooses between FLA's functions and its own PyTorch code, which it takes for graphs that are exported."""

QUESTION = "is_torchdynamo_exporting"


def _correct(module: ModuleType) -> None:
    """Lets compiled models reach FLA's functions with PyTorch 2.11, too."""
    if QUESTION in vars(module):
        _State.patches.set(module, QUESTION, is_exporting)


def is_exporting() -> bool:
    """As `torch.compiler.is_exporting`, which PyTorch 2.11 answers with True whenever it compiles (pytorch/pytorch#176347)."""
    return torch.compiler._is_exporting_flag


def _patch_device_context() -> None:
    """FLA 0.5 asks torch.cpu for the device of no index."""
    utils = import_module("fla.utils")
    theirs = getattr(utils, "custom_device_ctx", None)
    if theirs is not None and theirs.__module__ == "fla.utils":
        _State.patches.set(utils, theirs.__name__, lambda index: nullcontext() if index is None else theirs(index))
