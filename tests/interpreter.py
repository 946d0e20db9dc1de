"""Makes Triton's interpreter order-stable, strict about launches, and fast.

In an order-stable `tl.dot` an element's bits depend on its row and its column alone.

Triton interprets `tl.dot` as numpy's matrix product, which is OpenBLAS: the order in which it sums follows the CPU that
it finds and the shape of the tile, so that a row alone can have other bits than the same row in a tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Step = Callable[[Any, Any], Any]  # of a semantic and an operand: the operand that an operation takes


def product(a: Array, b: Array, dtype: np.dtype[Any]) -> Array:
    """a [..., M, K] times b [..., K, N] in `dtype`, a tree of elementwise sums over K; float16 is summed in float32."""
    if not np.issubdtype(dtype, np.floating):
        return np.matmul(a, b, dtype=dtype)  # integers have no rounding
    exact = np.promote_types(dtype, np.float32)
    rows = np.ascontiguousarray(np.moveaxis(a, -1, 0), exact)  # [K, ..., M]
    columns = np.ascontiguousarray(np.moveaxis(b, -2, 0), exact)  # [K, ..., N]
    # Nothing is contracted here: each element is one product, rounded once. np.multiply takes twice the time.
    terms = np.einsum("...m,...n->...mn", rows, columns)
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half] += terms[count - half : count]
        count -= half
    return terms[0].astype(dtype)


def make_order_stable() -> None:
    """For all kernels of this process."""
    from triton import language as tl
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        rows, columns = a.data, b.data
        if any(one.dtype.is_floating() and one.dtype.primitive_bitwidth == 8 for one in (a, b)):
            rows = interpreter._convert_float(rows, a.dtype, tl.float16, None).view(np.float16)
            columns = interpreter._convert_float(columns, b.dtype, tl.float16, None).view(np.float16)
        return interpreter.TensorHandle(product(rows, columns, d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def check_options() -> None:
    """Refuse a number of warps that a GPU refuses: the interpreter takes any, since it has none."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def run_checked(self: Any, *args: Any, num_warps: int = 4, **kwargs: Any) -> Any:
        if num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"num_warps: expected a power of two up to 32 for {self.__name__}, got {num_warps}")
        return run(self, *args, **kwargs)

    InterpretedFunction.run = run_checked


def make_fast() -> None:
    """Leave out what takes two thirds of the time of these tests and changes nothing in them."""
    from triton import language as tl
    from triton.runtime import interpreter

    # Whether integers overflow is computed at each sum, and asked for in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)

    patch, launch, dtype_of = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    patch_attr, checks = interpreter._patch_attr, tl.core.add.__code__  # what checks in each builtin for _semantic
    patched: set[Any] = set()
    modules_of: dict[int, set[Any]] = {}  # by the names that a function sees
    dtypes: dict[Any, np.dtype[Any]] = {}

    def patch_others(fn: Any) -> Any:
        """Replace the builtins of Triton's language once in a launch, not at each call of a jitted function in it."""
        names = fn.__globals__
        if id(names) not in modules_of:
            modules_of[id(names)] = {one for one in (tl, tl.core) if any(value is one for value in names.values())}
        modules = modules_of[id(names)]
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(fn)

    def launch_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()  # the launch took its replacements back

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Call a builtin itself, not what checks for a semantic that it is given here."""
        if getattr(member, "__code__", None) is not checks:
            patch_attr(obj, name, member, builder, scope)
            return
        builtin, semantic = member.__wrapped__, interpreter.interpreter_semantic

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return builtin(*args, _semantic=semantic, **kwargs)

        scope.set_attr(obj, name, call)

    def known_dtype_of(dtype: Any) -> np.dtype[Any]:
        """Not by a table made anew at each call."""
        name = dtype.element_ty.name if isinstance(dtype, tl.block_type) else dtype.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_others, launch_patched
    interpreter._get_np_dtype, interpreter._patch_attr = known_dtype_of, patch_builtin
    _unwrap_at_once(tl)
    _remember_shapes(tl)
    _remember_operands(tl)


def _unwrap_at_once(tl: Any) -> None:
    """A constant is its value, and what is no constant nor a sequence is itself; three classes were asked for first."""
    unwrap, constant = tl.core._unwrap_if_constexpr, tl.constexpr
    others = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}

    def unwrap_others(x: Any) -> Any:
        kind = type(x)
        return x.value if kind is constant else x if kind in others else unwrap(x)

    tl.core._unwrap_if_constexpr = unwrap_others


def _remember_shapes(tl: Any) -> None:
    """Types and values of a shape that came before share what it makes of them; each was made anew for every value."""
    of_tensors: dict[tuple[int, ...], dict[str, Any]] = {}
    of_types: dict[tuple[int, ...], tuple[dict[str, Any], str]] = {}
    new_tensor, new_type = tl.tensor.__init__, tl.block_type.__init__

    def sizes_of(shape: Any) -> tuple[int, ...]:
        values = shape.values if isinstance(shape, tl.tuple) else shape
        return tuple([one.value if isinstance(one, tl.constexpr) else one for one in values])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in of_tensors:
            new_tensor(self, handle, type)
            of_tensors[sizes] = {name: vars(self)[name] for name in vars(self).keys() - {"handle", "type", "dtype"}}
            return
        self.__dict__ = {"handle": handle, "type": type, "dtype": type.scalar, **of_tensors[sizes]}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of(shape)
        if sizes not in of_types:
            new_type(self, element_ty, shape)
            shared = {name: vars(self)[name] for name in vars(self).keys() - {"element_ty", "name"}}
            self.sizes = shared["sizes"] = sizes
            of_types[sizes] = shared, str(self.shape)
            return
        shared, text = of_types[sizes]
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"
        vars(self).update(shared)

    tl.tensor.__init__, tl.block_type.__init__ = init_tensor, init_type


def _remember_operands(tl: Any) -> None:
    """What an operation makes of two operands first follows from their types, and from the value of a number."""
    from triton.language.semantic import TritonSemantic

    def step(before: Any, after: Any) -> Step | None:
        """What makes `after` of an operand like `before`; None where that is more than a splat or a broadcast."""
        if after is before:
            return lambda semantic, x: x
        if not isinstance(before, tl.tensor):
            after.handle.data.flags.writeable = False
            return lambda semantic, x: after
        kind = after.type
        if before.dtype != after.dtype or not kind.is_block():
            return None
        if not before.type.is_block():
            return lambda semantic, x: semantic.tensor(semantic.builder.create_splat(kind, x.handle), kind)
        if len(before.shape) == len(after.shape):
            sizes = list(kind.sizes)
            return lambda semantic, x: semantic.tensor(semantic.builder.create_broadcast(x.handle, sizes), kind)
        return None

    def remembered(make: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        known: dict[Any, tuple[Step, Step]] = {}

        def operands(self: Any, *pair: Any, **flags: Any) -> tuple[Any, Any]:
            if flags:
                return make(self, *pair, **flags)
            # A number by its text, for 1 is 1.0 and True.
            key = tuple([x.type.name if isinstance(x, tl.tensor) else (type(x), repr(x)) for x in pair])
            steps = known.get(key)
            if steps is not None:
                return steps[0](self, pair[0]), steps[1](self, pair[1])
            found = make(self, *pair)
            first, second = (step(before, after) for before, after in zip(pair[:2], found, strict=True))
            if first is not None and second is not None:
                known[key] = first, second
            return found

        return operands

    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(TritonSemantic, name, remembered(getattr(TritonSemantic, name)))
