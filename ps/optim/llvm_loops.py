"""Loops over flat float32 tensors, compiled by LLVM for this processor. Some read and write half precision.

Each of torch's kernels makes its own pass over memory: one sums the gradients, another steps with the sum. If
memory limits the speed, the number of passes decides. A compiled loop does everything in one pass.

Import this file only if `sums.loops_work()` is true: it needs llvmlite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from torch import Tensor

LANES = 16
"""Elements of a vector: 64 bytes, a cache line. On processors with shorter vectors, several make one."""

Vector = Any
"""LANES elements of a tensor, or one number LANES times, in the code that is being generated."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)
_INDEX = ir.IntType(64)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_KINDS = {torch.float32: _FLOAT, torch.float16: ir.HalfType(), torch.bfloat16: ir.IntType(16)}
"""What a loop can read and write, as LLVM sees it: a bfloat16 is the upper half of a float32."""
_ALIGNED = 2
"""Bytes: a payload may begin between vectors. Aligned payloads are not slower with this setting."""


def converts(dtype: torch.dtype) -> bool:
    """Returns whether loops can read and write a dtype on this processor.

    For float16 without instructions, LLVM calls functions that no library of this process has.
    """
    features = llvm.get_host_cpu_features()  # of x86, and of ARM
    return dtype is not torch.float16 or bool(features.get("f16c") or features.get("neon"))


class Arithmetic:
    """The operations for a loop's body; each rounds once, as in IEEE 754.

    Args:
        builder: Receives the instructions.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder = builder
        self.add: Callable[[Vector, Vector], Vector] = builder.fadd
        self.sub: Callable[[Vector, Vector], Vector] = builder.fsub
        self.mul: Callable[[Vector, Vector], Vector] = builder.fmul
        self.div: Callable[[Vector, Vector], Vector] = builder.fdiv
        self.neg: Callable[[Vector], Vector] = builder.fneg

    def fma(self, one: Vector, two: Vector, three: Vector) -> Vector:
        """Returns `one * two + three`, rounded once."""
        return self._call("fma", one, two, three)

    def sqrt(self, one: Vector) -> Vector:
        """Returns the square root."""
        return self._call("sqrt", one)

    def sum(self, vectors: Sequence[Vector]) -> Vector:
        """Returns the sum of all vectors, in their order."""
        return reduce(self.add, vectors)

    def where_finite(self, one: Vector, then: Vector, otherwise: Vector) -> Vector:
        """Returns `then` in the lanes in which `one` is finite, `otherwise` in the other lanes."""
        finite = self._builder.fcmp_ordered("==", self.sub(one, one), _ZEROS)
        return self._builder.select(finite, then, otherwise)

    def _call(self, name: str, *given: Vector) -> Vector:
        name = f"llvm.{name}.v{LANES}f32"
        module = self._builder.module
        known = module.globals.get(name)
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(given))
        return self._builder.call(known or ir.Function(module, kind, name), given)


Vectors = list[Vector]
Numbers = Mapping[str, Vector]
Body = Callable[[Arithmetic, Vectors, Vectors, Numbers], Vectors]
"""Computes new vectors for the changed tensors from the vectors of the changed tensors, the vectors of the
read tensors, and the numbers by name. In a loop that adds up, the last result is the vector to add."""


class Loop:
    """A compiled loop. Any thread can call it; it releases the interpreter lock.

    Args:
        changed: How many tensors the loop changes.
        read: How many tensors the loop only reads.
        numbers: Names of the loop's scalar arguments.
        body: Generates the code for each vector.
        adds_up: Whether a call returns the sum of all elements of the body's last vector.
        reads: The dtype of the tensors that the loop only reads; the body gets float32.
        writes: The dtype of one more tensor, which gets the body's first vector, rounded to nearest even.

    Attributes:
        lanes: Elements of a vector.
    """

    lanes = LANES

    def __init__(
        self,
        changed: int,
        read: int,
        numbers: Sequence[str],
        body: Body,
        *,
        adds_up: bool = False,
        reads: torch.dtype = torch.float32,
        writes: torch.dtype | None = None,
    ) -> None:
        self._numbers = tuple(numbers)
        written = [] if writes is None else [_KINDS[writes]]
        given = [_FLOAT] * changed + [_KINDS[reads]] * read
        module = _module(given, written, changed, self._numbers, body, adds_up=adds_up)
        self._engine = _engine(module)  # owns the code
        pointers = [ctypes.c_void_p] * len(given + written)
        kinds = [ctypes.c_size_t, *pointers, *[ctypes.c_float] * len(numbers)]
        self._call = ctypes.CFUNCTYPE(ctypes.c_float, *kinds)(self._engine.get_function_address("loop"))

    def __call__(
        self,
        changed: Sequence[Tensor],
        read: Sequence[Tensor],
        numbers: Mapping[str, float],
        written: Sequence[Tensor] = (),
    ) -> float:
        """Runs over all whole vectors of contiguous tensors of one length, which must not overlap.

        Returns:
            The sum if the loop adds up, otherwise 0.
        """
        pointers = [tensor.data_ptr() for tensor in (*changed, *read, *written)]
        given = [numbers[name] for name in self._numbers]
        return float(self._call(changed[0].numel() // LANES * LANES, *pointers, *given))


def _module(
    read: list[ir.Type],
    written: list[ir.Type],
    changed: int,
    numbers: Sequence[str],
    body: Body,
    *,
    adds_up: bool,
) -> ir.Module:
    """Returns a loop over tensors of these kinds, of which it changes the first ones."""
    module = ir.Module("loop")
    module.triple = llvm.get_process_triple()
    elements = read + written
    kinds = [_INDEX, *[kind.as_pointer() for kind in elements], *[_FLOAT] * len(numbers)]
    function = ir.Function(module, ir.FunctionType(_FLOAT, kinds), "loop")
    length, *given = function.args
    tensors, scalars = given[: len(elements)], given[len(elements) :]
    for tensor in tensors:
        tensor.add_attribute("noalias")
    before, loop, end = (function.append_basic_block(name) for name in ("before", "loop", "end"))

    builder = ir.IRBuilder(before)
    named = {name: _spread(builder, scalar) for name, scalar in zip(numbers, scalars, strict=True)}
    builder.cbranch(builder.icmp_unsigned("==", length, _INDEX(0)), end, loop)

    builder.position_at_end(loop)
    place, total = builder.phi(_INDEX), builder.phi(_VECTOR)
    places = [
        builder.bitcast(builder.gep(tensor, [place]), ir.VectorType(kind, LANES).as_pointer())
        for tensor, kind in zip(tensors, elements, strict=True)
    ]
    values = [_widened(builder, builder.load(one, align=_ALIGNED)) for one in places[: len(read)]]
    results = body(Arithmetic(builder), values[:changed], values[changed:], named)
    sum_so_far = builder.fadd(total, results.pop()) if adds_up else total
    for result, one in zip(results, places[:changed], strict=True):
        builder.store(result, one, align=_ALIGNED)
    for kind, one in zip(written, places[len(read) :], strict=True):
        builder.store(_rounded(builder, results[0], kind), one, align=_ALIGNED)
    next_place = builder.add(place, _INDEX(LANES))
    for phi, first, then in ((place, _INDEX(0), next_place), (total, _ZEROS, sum_so_far)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_unsigned("<", next_place, length), loop, end)

    builder.position_at_end(end)
    lanes = builder.phi(_VECTOR)
    lanes.add_incoming(_ZEROS, before)
    lanes.add_incoming(sum_so_far, loop)
    across = ir.Function(
        module, ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR]), f"llvm.vector.reduce.fadd.v{LANES}f32"
    )
    builder.ret(builder.call(across, [_FLOAT(0.0), lanes]))
    return module


def _widened(builder: ir.IRBuilder, vector: Vector) -> Vector:
    """Returns a vector as float32."""
    if vector.type == _VECTOR:
        return vector
    if vector.type.element == ir.HalfType():
        return builder.fpext(vector, _VECTOR)
    return builder.bitcast(builder.shl(builder.zext(vector, _BITS), _all(16)), _VECTOR)


def _rounded(builder: ir.IRBuilder, vector: Vector, kind: ir.Type) -> Vector:
    """Returns a float32 vector in half precision, rounded to nearest even."""
    if kind == ir.HalfType():
        return builder.fptrunc(vector, ir.VectorType(kind, LANES))
    bits = builder.bitcast(vector, _BITS)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    upper = builder.lshr(builder.add(bits, builder.add(odd, _all(0x7FFF))), _all(16))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(is_nan, _all(0x7FC0), upper), ir.VectorType(kind, LANES))


def _all(number: int) -> ir.Constant:
    return ir.Constant(_BITS, [number] * LANES)


def _spread(builder: ir.IRBuilder, scalar: Vector) -> Vector:
    """Returns a vector with the number in every lane."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


def _engine(module: ir.Module) -> llvm.ExecutionEngine:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = _machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


def _machine() -> llvm.TargetMachine:
    _initialize()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
