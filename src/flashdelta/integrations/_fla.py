"""FLA (flash-linear-attention) 0.5 and 0.6 on flashdelta: its KDA functions, and with them its models, NeMo's, and those of
Hugging Face that take `chunk_kda` from it.

FLA asks its registered backends before every call: a verifier says whether a backend takes it. Ours takes calls all of whose
arguments it knows and a kernel supports; FLA runs the others. On a CPU, where FLA has nothing to run, the reference takes them.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import chunk_kda, fused_recurrent_kda, kernels
from ..backends import KERNEL
from ..runtime.call import public_call
from . import Status, packing
from .engine import Integration

ENVIRONMENT = "FLA_FLASHDELTA"
"""`FLA_FLASHDELTA=0` turns the integration off. Read at every call, as FLA reads its own switches."""

READ = ("0.5.0", "0.5.1", "0.5.2", "0.6.0")
"""Versions that this was written and tested against. Others run if their signatures are those of these."""

DISTRIBUTIONS = ("fla-core", "flash-linear-attention")
"""Releases are two packages, of which the first has the kernels. An installation from FLA's repository is the second alone."""

DISPATCH_OFF = "FLA_DISABLE_BACKEND_DISPATCH=1"


class Unfit(ValueError):
    """Raised for a call that FLA keeps, or that runs nowhere on a CPU, with the reason."""


@dataclass(eq=False)
class Adapter:
    """Translation of calls of a function of FLA's into calls of ours.

    `taken`: FLA's arguments that ours has, by its names or by `OLD_NAMES`. `ignored`: what only FLA's kernels need. `constant`:
    what only ours needs. An argument that is None counts as left out, and one that is in none of these leaves the call to FLA.
    """

    op: Callable[..., Any]
    taken: frozenset[str]
    ignored: frozenset[str] = frozenset()
    constant: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] = lambda call, given: None
    """Says why FLA keeps a call, from our arguments and FLA's."""

    parameters: tuple[str, ...] = ()
    """Names of FLA's parameters, in its order, as installed."""

    def read(self, function: Callable[..., Any]) -> str | None:
        """Takes over the signature of FLA's function, or says how it differs from those that were read."""
        parameters = inspect.signature(function).parameters.values()
        named = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        if missing := REQUIRED - named.keys():
            return f"{function.__name__} lacks {', '.join(sorted(missing))}"
        left_out = {repr(x) for x in (None, False, inspect.Parameter.empty)}
        unknown = named.keys() - self.taken - self.ignored - OLD_NAMES.keys() - UNTAKEN
        other = {name for name, x in named.items() if repr(x) not in DEFAULTS.get(name, left_out)}
        if unknown or other:
            found = (f"{name}={named[name]!r}" if name in other else name for name in sorted(unknown | other))
            return f"{function.__name__} has parameters {', '.join(found)}"
        self.parameters = tuple(named)
        return None

    def fit(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Returns our arguments.

        Raises:
            Unfit: FLA keeps the call.
        """
        given = dict(zip(self.parameters, arguments)) | dict(named) if arguments else named
        if len(given) != len(arguments) + len(named):
            twice = sorted(named.keys() & {*self.parameters[: len(arguments)]})
            what = f"multiple values for argument {twice[0]!r}" if twice else f"{len(arguments)} positional arguments"
            raise TypeError(f"{self.op.__name__}() got {what}")
        call: dict[str, Any] = {"backend": KERNEL, **self.constant}
        for name, x in given.items():
            if x is None or name in self.ignored:
                continue
            ours = name if name in self.taken else OLD_NAMES.get(name)
            if ours is None or ours in call:
                raise Unfit(f"{name}: flashdelta.{self.op.__name__} has no such argument")
            call[ours] = x
        if not call.get("use_gate_in_kernel"):  # with which alone FLA reads these
            for name in ("A_log", "dt_bias", "lower_bound"):
                call.pop(name, None)
        if "cp_context" in call:  # whose offsets count
            for name in ("cu_seqlens", "cu_seqlens_cpu"):
                call.pop(name, None)
        reason = self.refusal(call, given)
        if reason is not None:
            raise Unfit(reason)
        return call

    def verify(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[bool, str | None]:
        """FLA's question: whether we take the call, and why not. On a CPU, where FLA has no kernels, we take every call: one
        that we refuse ends in our reason."""
        if is_on_cpu(*arguments, *named.values()):
            return True, None
        try:
            why = public_call(self.op).refusal(self.fit(arguments, named))
        except (Unfit, TypeError) as reason:
            why = str(reason)
        return why is None, why


def is_on_cpu(*arguments: Any) -> bool:
    """Tells whether there are tensors, and all lie there."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    return bool(tensors) and all(x.is_cpu for x in tensors)


def chunk_refusal(call: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Names what FLA itself refuses, with messages of its own."""
    state = call.get("initial_state")
    if isinstance(state, Tensor) and state.dtype == torch.bfloat16:
        return "initial_state: bfloat16; FLA takes float32"
    if call.get("safe_gate") and call.get("use_gate_in_kernel") and "lower_bound" not in call:
        return "safe_gate: True with a gate that has no lower_bound"
    if call.get("return_intermediate_states"):
        if not torch.is_inference_mode_enabled():
            return "return_intermediate_states: True outside of inference mode"
        if given.get("use_graph") and "cu_seqlens" in call:
            return "use_graph: True with return_intermediate_states and cu_seqlens; FLA's h has rows for chunks to come"
    if given.get("use_graph") and "cp_context" in call:
        return "use_graph: True with cp_context; FLA's context then counts ranks on the device"
    return None


def inplace_refusal(call: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    # FLA's default is to write into initial_state
    return "inplace_final_state: True" if given.get("inplace_final_state", True) else None


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


REQUIRED = words("q k v g beta scale cu_seqlens")
COMMON = """q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
    use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens A_log dt_bias"""
OLD_NAMES = {"transpose_state_layout": "state_v_first"}
DEFAULTS = {"chunk_size": {"64"}, "inplace_final_state": {"True"}}
"""Defaults of FLA's, as printed, that are neither None nor False and mean the same here."""

UNTAKEN = words("cp_context ssm_state_indices num_accepted_tokens")
"""FLA's arguments that leave a call to it, unless they are None."""

CHUNK = Adapter(
    chunk_kda,
    words(f"{COMMON} safe_gate disable_recompute return_intermediate_states cu_seqlens_cpu chunk_size cp_context"),
    # every launch of ours can be captured, with any number of sequences
    ignored=words("use_graph max_num_seqs"),
    refusal=chunk_refusal,
)
RECURRENT = Adapter(fused_recurrent_kda, words(f"{COMMON} out"), words("inplace_final_state"), refusal=inplace_refusal)
WY = Adapter(
    kernels.chunk_bwd_wy_dqkg,
    words("q k v v_new g beta A h do dh dv scale state_v_first cu_seqlens chunk_size"),
    ignored=words("chunk_indices chunk_offsets use_graph"),
    constant={"use_exp2": True},
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
    """Says how FLA's base class of backends differs from those that were read. A question by another name would never reach
    ours."""
    missing = [name for name in ("is_available", "is_enabled", "verify") if not hasattr(base, name)]
    if missing:
        return [f"BaseBackend lacks {', '.join(missing)}"]
    parameters = inspect.signature(base.verify).parameters
    _, _, *rest = kinds = [p.kind.name for p in parameters.values()]
    if len(kinds) == 4 and rest == ["VAR_POSITIONAL", "VAR_KEYWORD"]:
        return []
    return [f"BaseBackend.verify has parameters {', '.join(parameters)}"]


def backend_class(base: type) -> type:
    """Returns our backend, derived from FLA's base class."""

    class FlashDelta(base):  # type: ignore[misc]
        """KDA by flashdelta."""

        backend_type = package_name = "flashdelta"
        env_var = ENVIRONMENT
        priority = 2  # lower comes first; FLA's own have 3 and more

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


def is_on() -> bool:
    return FLA.enabled and FLA.forbidden() is None


FILES = {"chunk_kda": "chunk", "fused_recurrent_kda_fwd": "fused_recurrent", "chunk_kda_bwd_wy_dqkg_fused": "chunk_bwd"}
"""Functions of `fla.ops.kda`, and the files that they are in."""


@dataclass(eq=False, kw_only=True)
class Fla(Integration):
    """FLA, whose registry gets a backend that takes no call before it is enabled. The variable is read at every call."""

    registered: bool = False
    differs: str | None = None

    def version(self) -> str | None:
        """Version as installed, or what a source tree on the path says once it is imported."""
        if not is_installed():
            return None
        for name in DISTRIBUTIONS:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return getattr(import_module("fla"), "__version__", "of unknown version")

    def obstacle(self, version: str) -> str | None:
        """Registers our backend, or says how FLA differs from what was read."""
        if not self.registered and self.differs is None:
            import_module("fla")
            try:
                self.differs = self.register()
            except Exception as error:  # whatever another version does otherwise
                self.differs = f"{type(error).__name__}: {error}"
            self.registered = self.differs is None
        return self.differs

    def register(self) -> str | None:
        functions = {name: getattr(import_module(f"fla.ops.kda.{where}"), name) for name, where in FILES.items()}
        found = [difference for name, f in functions.items() if (difference := ADAPTERS[name].read(f))]
        registry = import_module(import_module("fla.ops.kda.chunk").dispatch.__module__)
        found += unlike(registry.BaseBackend)
        if registry._DISPATCH_DISABLED:
            return DISPATCH_OFF
        if found:
            return "; ".join(found)
        backend = backend_class(registry.BaseBackend)
        if hasattr(registry, "register"):
            registry.register(functions["chunk_kda"])(backend)
            registry.register("kda")(backend)
        else:
            register_by_operation(backend())
        return None

    def apply(self) -> None:
        utils = import_module("fla.utils")
        if getattr(getattr(utils, "custom_device_ctx", None), "__module__", None) == "fla.utils":
            self.applied.wrap(utils, "custom_device_ctx", with_default_device)
        for name in GENERATION:
            self.applied.when_imported(name, refuse_generation)
        if util.find_spec("transformers") is not None:
            packing.patch(self.applied, is_on)
        if torch.__version__ < (2, 12) and self.forbidden() is None:
            self.applied.when_imported(TRANSFORMERS, correct_question)

    def status(self) -> Status:
        """Says where the integration stands. Imports FLA, and turns nothing on."""
        try:
            found = super().status()
        except Exception as error:  # FLA's own, such as a Triton that it does not run with
            return Status("fla", "unknown version", self.version(), f"its import fails: {error}")
        if found.reason == DISPATCH_OFF:
            return replace(found, state="off")
        reason = installed_obstacle() if found.state in ("active", "possible") else None
        return found if reason is None else replace(found, reason=f"{found.reason}; {reason}: refused")


def is_installed() -> bool:
    """Tells whether there is a package of that name; a folder without one in it does not count."""
    return "fla" in sys.modules or getattr(util.find_spec("fla"), "origin", None) is not None


def register_by_operation(backend: object) -> None:
    """Registers it with FLA 0.5, which has one registry per operation, and asks none for `fused_recurrent_kda_fwd`."""
    import_module("fla.ops.kda.backends").kda_registry.register(backend)
    module = import_module("fla.ops.kda.fused_recurrent")
    original = module.fused_recurrent_kda_fwd

    def fused_recurrent_kda_fwd(*arguments: Any, **named: Any) -> Any:
        takes = is_on() and RECURRENT.verify(arguments, named)[0]
        return (run_recurrent if takes else original)(*arguments, **named)

    setattr(module, original.__name__, fused_recurrent_kda_fwd)


def with_default_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Corrects FLA 0.5, which asks torch.cpu for the device of no index."""
    return lambda index: nullcontext() if index is None else original(index)


GENERATION = ("fla.models.generation_utils", "fla.models.utils")
"""Modules of FLA with its models' `FLAGenerationMixin`: 0.6, and 0.5."""


def installed_obstacle() -> str | None:
    """Says why FLA's own models can't generate with the transformers that is there."""
    for name in GENERATION:
        with suppress(ImportError):
            mixin = getattr(import_module(name), "FLAGenerationMixin", None)
            if mixin is not None:
                return generation_obstacle(mixin)
    return None


def generation_obstacle(mixin: Any) -> str | None:
    """Says why models of FLA, whose class of generation this is, can't generate with a cache: from 5.24 on, transformers passes
    it as `cache`, where they read `past_key_values`, and every token would begin with an empty one."""
    own, base = (inspect.signature(x.prepare_inputs_for_generation).parameters for x in (mixin, mixin.__mro__[1]))
    if "cache" not in base or "cache" in own:
        return None
    version = metadata.version("transformers")
    return f"FLA's own models can't generate with a cache with transformers {version} (before 5.24 they can)"


def refuse_generation(module: ModuleType) -> None:
    """Lets FLA's models refuse what they would generate wrongly."""
    mixin = vars(module).get("FLAGenerationMixin")
    if mixin is None or mixin.__module__ != module.__name__ or (reason := generation_obstacle(mixin)) is None:
        return

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_inputs_for_generation(*arguments: Any, **named: Any) -> Any:
            if named.get("use_cache", True):
                ways = "pip install 'transformers<5.24', pass use_cache=False, or use the model of transformers"
                raise RuntimeError(f"{reason}: {ways}")
            return original(*arguments, **named)

        return prepare_inputs_for_generation

    FLA.applied.wrap(mixin, "prepare_inputs_for_generation", refusing)


TRANSFORMERS = "transformers.integrations.hub_kernels"
"""Module that chooses between FLA's functions and PyTorch code of its own, which it takes for graphs that are exported."""

QUESTION = "is_torchdynamo_exporting"


def correct_question(module: ModuleType) -> None:
    """Lets compiled models reach FLA's functions with PyTorch 2.11, too."""
    if QUESTION in vars(module):
        FLA.applied.set(module, QUESTION, is_exporting)


def is_exporting() -> bool:
    """Answers as `torch.compiler.is_exporting`; PyTorch 2.11 says True whenever it compiles (pytorch/pytorch#176347)."""
    return torch.compiler._is_exporting_flag


FLA = Fla(
    name="fla",
    package="flash-linear-attention",
    environment=ENVIRONMENT,
    replaces=", ".join(ADAPTERS),
    way="import flashdelta.integrations.fla",
)
enable, disable, status = FLA.enable, FLA.disable, FLA.status
