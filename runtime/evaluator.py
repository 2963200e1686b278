"""Core ML's arithmetic without Core ML: a saved package, read back and run op by op in numpy.

Every op is computed in float64 from float16 numbers, and its result rounded to float16, as Core ML does in float16 programs.
So results are those of exact sums, the same on every machine and at every width; Core ML's own sums may be rounded on the way.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from specedge import mlpackage
from specedge.errors import SpecedgeError
from specedge.mlpackage import import_coremltools
from specedge.runtime.package import load_spec

Array = npt.NDArray[Any]


class Program:
    """All functions of a package; weights that several read are there once."""

    def __init__(self, package: Path) -> None:
        import_coremltools("libmilstoragepython", str(package))  # what reads weights, where it was built
        milproto = import_coremltools("converters.mil.frontend.milproto.load", str(package))
        self._lock = threading.Lock()
        spec = load_spec(package)
        try:
            self._program = milproto.load(spec, spec.specificationVersion, str(package / mlpackage.WEIGHTS))
        except Exception as error:  # coremltools raises whatever its parsers do
            raise SpecedgeError(f"{package}: cannot be read ({str(error)[:200]}); convert again") from error
        self._made: dict[str, list[tuple[list[Array], Array]]] = {}
        self._ready: set[str] = set()

    @property
    def functions(self) -> dict[str, Any]:
        """By their names, as coremltools reads them."""
        functions: dict[str, Any] = self._program.functions
        return functions

    def run(self, name: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of a function by their names, in the types that it declares.

        Raises:
            SpecedgeError: It has an op that nothing here can compute.
        """
        function = self.functions[name]
        with self._lock, np.errstate(all="ignore"):  # what is not finite is for the reader of the outputs to refuse
            self._prepare(function)
            for key, var in function.inputs.items():
                _set(var, inputs[key])
            for op in function.operations:
                if op.op_type != "const" and not op.op_type.startswith("constexpr_"):
                    made = _compute(op)
                    for var, value in zip(op.outputs, made if isinstance(made, (list, tuple)) else [made], strict=True):
                        _set(var, value)
            return {var.name: var.val.astype(_numpy_type(var.dtype)) for var in function.outputs}

    def _prepare(self, function: Any) -> None:
        """Give a function's constants the values they stand for."""
        if function.name in self._ready:
            return
        for op in function.operations:
            if op.op_type.startswith("constexpr_"):
                parts = [var for var in op.inputs.values() if var is not None]
                self._share(op.outputs[0], parts, op.materialized_val_inference)
            elif op.op_type == "const" and isinstance(op.outputs[0].val, np.generic):
                flag = op.outputs[0].val.item()  # numpy takes no bool of its own as one
                op.outputs[0]._sym_val = SimpleNamespace(val=flag)
            elif op.op_type == "const" and isinstance(op.outputs[0].val, np.ndarray):
                var = op.outputs[0]
                if not var.child_ops or not all(reader.op_type.startswith("constexpr_") for reader in var.child_ops):
                    self._share(var, [var], functools.partial(np.asarray, var.val))
        self._ready.add(function.name)

    def _share(self, var: Any, parts: list[Any], make: Callable[[], Array]) -> None:
        """Give a constant the value that another function has made of the same parts, or make it; parts are shared likewise."""
        own, made = [np.asarray(part.val) for part in parts], self._made.setdefault(var.name, [])
        same = (one for one in made if len(one[0]) == len(own) and all(map(np.array_equal, one[0], own)))
        if (found := next(same, None)) is None:
            found = own, _rounded(var, np.asarray(make()))
            made.append(found)
        for part, array in zip(parts, found[0], strict=True):
            part._sym_val = SimpleNamespace(val=array)
        var._sym_val = SimpleNamespace(val=found[1])


_OPEN: "weakref.WeakValueDictionary[tuple[str, int, int], Program]" = weakref.WeakValueDictionary()
_opening = threading.Lock()


def open_program(package: Path) -> Program:
    """The program of a package, the same for all who hold it.

    Raises:
        SpecedgeError: It cannot be read.
    """
    stat = (package / mlpackage.MODEL).stat()
    key = (str(package.resolve()), stat.st_mtime_ns, stat.st_ino)
    with _opening:
        if (program := _OPEN.get(key)) is None:
            program = _OPEN[key] = Program(package)
        return program


def _silu(op: Any) -> Array:
    silu: Array = op.x.val / (1 + np.exp(-op.x.val))
    return silu


_OWN: dict[str, Callable[[Any], Array]] = {"silu": _silu}  # coremltools has no arithmetic for these


def _compute(op: Any) -> Any:
    try:
        return _OWN[op.op_type](op) if op.op_type in _OWN else op.value_inference()
    except NotImplementedError:
        raise SpecedgeError(f"op {op.op_type} ({op.name}): coremltools cannot compute it, nor can this version") from None


def _set(var: Any, value: Any) -> None:
    var._sym_val = SimpleNamespace(val=_rounded(var, np.asarray(value)))


def _rounded(var: Any, value: Array) -> Array:
    """A value as the type of `var` has it; floats in float64."""
    if value.dtype.kind != "f":
        return value
    return value.astype(_numpy_type(var.dtype)).astype(np.float64)


@functools.cache
def _numpy_type(builtin: Any) -> npt.DTypeLike:
    types = import_coremltools("converters.mil.mil.types", "the evaluator")
    dtype: npt.DTypeLike = types.nptype_from_builtin(builtin)
    return dtype
