"""Gluon: logits of an item's rows over latent rows of codes on Hopper: of keys that are converted to float16, or of
codes as they are, with one scale or with one for each group of channels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..gluon_device import LOG2E, SMALLEST_SCALE, approximate, bits, tanh
from .hopper_fp8_operands import PANEL, PANELS, halves_of, key_operand, key_words
from .hopper_fp8_rooms import GROUPS
from .hopper_items import KEYS, LATENT, ROPE, visible


@gluon.jit
def _zero(c):
    """0, which the compiler does not know (c counts tiles, fewer than 2**28): else it keeps the places of all parts of
    the queries, for which there are no registers."""
    return c >> 28


@gluon.jit
def _logits(c, rooms, shape):
    """Products [KEYS, ROWS] of an item's rows with a tile's keys. Codes are read a part ahead, and while a part is
    multiplied the next is converted."""
    LAYOUT: gl.constexpr = key_words(ROPE // 4)
    PANEL_LAYOUT: gl.constexpr = key_words(PANEL // 4)
    HALF_PANEL: gl.constexpr = PANEL // 2
    words = rooms.words(c)
    q_latent = rooms.q_latent.index(_zero(c))
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    rope = rooms.rope_words(c).load(LAYOUT)
    some = words.slice(0, PANEL // 4, 1).load(PANEL_LAYOUT)
    a = key_operand(rope, shape.MMA)
    s = warpgroup_mma(a, rooms.q_rope.permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(PANELS):
        first, second = halves_of(some)
        a = key_operand(first, shape.MMA)
        if i + 1 < PANELS:
            some = words.slice((i + 1) * (PANEL // 4), PANEL // 4, 1).load(PANEL_LAYOUT)
        q = q_latent.slice(i * PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # the registers of the operand before are free
        a = key_operand(second, shape.MMA)
        q = q_latent.slice(i * PANEL + HALF_PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _code_logits(c, rooms, shape):
    """As `_logits`, of keys as they are stored, by queries that are the sum of two e4m3. Each part has sums of its own:
    an instruction keeps 13 bits of the larger of its sum and its products."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.CODE_MMA, k_width=4)
    SOME: gl.constexpr = PANEL // 2  # channels that are read ahead; there are no registers for more
    low = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.CODE_MMA)
    high = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.CODE_MMA)
    q_latent, q_rope = rooms.query_codes(_zero(c), shape.ROWS), rooms.query_rope_codes(shape.ROWS)
    keys = rooms.key_codes(c)
    rope = rooms.rope_codes(c).load(OPERAND)
    codes = keys.slice(0, SOME, 1).load(OPERAND)
    low, high = _both_parts(rope, q_rope, 0, low, high, False)
    for i in gl.static_range(LATENT // SOME):
        a = codes
        if i + 1 < LATENT // SOME:
            codes = keys.slice((i + 1) * SOME, SOME, 1).load(OPERAND)
        low, high = _both_parts(a, q_latent, i * SOME, low, high, True)
    low, high = warpgroup_mma_wait(0, deps=[low, high])
    return gl.convert_layout(low + high, shape.MMA, assert_trivial=True)


@gluon.jit
def _both_parts(a, q, at: gl.constexpr, low, high, ADD: gl.constexpr):
    """Products of codes [KEYS, n] with channels from `at` on of queries of two parts [2, ROWS, ..], added to the sums
    of each; those before are done, and the registers of their operand free."""
    low = warpgroup_mma(a, q.index(0).slice(at, a.shape[1], 1).permute((1, 0)), low, use_acc=ADD, is_async=True)
    high = warpgroup_mma(a, q.index(1).slice(at, a.shape[1], 1).permute((1, 0)), high, use_acc=ADD, is_async=True)
    return warpgroup_mma_wait(2, deps=[low, high])


@gluon.constexpr_function
def _scale_layout(count):
    """Of scales [KEYS, count], a thread's those of the keys whose logits it has."""
    registers = [*([0, 1 << i] for i in range(bits(count))), [8, 0]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [KEYS.value, count])


@gluon.jit
def largest_scales(w: gl.constexpr, c, begin, end, rooms, shape):
    """The largest scale of each key of a tile, [KEYS]. What is left in shared memory are a key's scales divided by
    that; 0 for keys outside begin..end."""
    LAYOUT: gl.constexpr = _scale_layout(GROUPS)
    scales = rooms.scale_rows(c).load(LAYOUT)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    live = (key >= begin) & (key < end)
    largest = gl.where(live, gl.maximum(gl.max(gl.abs(scales), 1), SMALLEST_SCALE), 1.0)
    ratios = scales * gl.expand_dims(approximate("rcp", largest), 1)
    ratios = gl.where(gl.expand_dims(live, 1), ratios, 0.0).to(gl.float16)
    rooms.ratios.index(w).permute((1, 0)).store(ratios)
    return gl.convert_layout(largest, gl.SliceLayout(1, shape.MMA), assert_trivial=True)


@gluon.jit
def _group_scales(i: gl.constexpr, c, rooms, shape):
    """The scales of a group, [KEYS]."""
    scales = rooms.scale_rows(c).slice(i, 1, 1).load(_scale_layout(1)).reshape([KEYS])
    return gl.convert_layout(scales, gl.SliceLayout(1, shape.MMA), assert_trivial=True)


@gluon.jit
def _grouped_logits(c, largest, rooms, shape):
    """As `_logits`, of rows with scales by groups. While a group is multiplied sums are multiples of the keys' scale of
    it: one accumulator for all of them."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.MMA, k_width=2)
    LAYOUT: gl.constexpr = key_words(PANEL // 4)
    HALF_PANEL: gl.constexpr = PANEL // 2
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    words, q_rope, q_latent = rooms.words(c), rooms.q_rope.permute((1, 0)), rooms.q_latent.index(_zero(c))
    if shape.DTYPE == gl.bfloat16:
        s = warpgroup_mma(rooms.rope_rows(c), q_rope, s, use_acc=False, is_async=True)
    else:
        rope = rooms.rope_rows(c).load(OPERAND).to(shape.DTYPE)
        s = warpgroup_mma(rope, q_rope, s, use_acc=False, is_async=True)
    unit = 1.0
    for i in gl.static_range(PANELS):
        first, second = halves_of(words.slice(i * (PANEL // 4), PANEL // 4, 1).load(LAYOUT))
        a = key_operand(first, shape.MMA)
        scales = _group_scales(i, c, rooms, shape)
        # Sums are divided by it: with a bound none becomes infinite, and a group that small does not count.
        least = gl.maximum(largest * 2.0**-24, 2.0**-60)
        scales = gl.expand_dims(gl.where(gl.abs(scales) < least, least, scales), 1)
        s = warpgroup_mma_wait(0, deps=[s])
        s *= unit * approximate("rcp", scales)
        unit = scales
        q = q_latent.slice(i * PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
        a = key_operand(second, shape.MMA)
        q = q_latent.slice(i * PANEL + HALF_PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s]) * unit


@gluon.jit
def _grouped_code_logits(c, rooms, shape):
    """As `_grouped_logits`, each group with sums of its own, of keys as they are stored."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.CODE_MMA, k_width=4)
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    s = warpgroup_mma(rooms.rope_rows(c), rooms.q_rope.permute((1, 0)), s, use_acc=False, is_async=True)
    q_latent, keys = rooms.query_codes(_zero(c), shape.ROWS), rooms.key_codes(c)
    for i in gl.static_range(PANELS):
        a = keys.slice(i * PANEL, PANEL, 1).load(OPERAND)
        product = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.CODE_MMA)
        for part in gl.static_range(2):
            q = q_latent.index(part).slice(i * PANEL, PANEL, 1).permute((1, 0))
            product = warpgroup_mma(a, q, product, use_acc=part > 0, is_async=True)
        if i == 0:
            s, product = warpgroup_mma_wait(0, deps=[s, product])
        else:
            product = warpgroup_mma_wait(0, deps=[product])
        scales = gl.expand_dims(_group_scales(i, c, rooms, shape), 1)
        s += gl.convert_layout(product, shape.MMA, assert_trivial=True) * scales
    return s


@gluon.jit
def logits_of(c, largest, softcap, rooms, shape):
    """Logits [KEYS, ROWS], as exponents of two, of a tile's keys; largest: of `largest_scales`."""
    if shape.GROUPED:
        if shape.CODE_PRODUCTS:
            s = _grouped_code_logits(c, rooms, shape)
        else:
            s = _grouped_logits(c, largest, rooms, shape)
    elif shape.CODE_PRODUCTS:
        s = _code_logits(c, rooms, shape)
    else:
        s = _logits(c, rooms, shape)
    scale = gl.expand_dims(rooms.factors.load(shape.ROW), 0)
    if shape.SOFTCAP:
        return tanh(s * (scale / (softcap * LOG2E))) * (softcap * LOG2E)
    else:
        return s * scale


@gluon.jit
def masked(s, item, part, key, past, shape):
    """Logits of a tile that begins with a key, -inf of keys that a row does not see."""
    q_row, _, _ = item.rows(gl.arange(0, shape.ROWS, shape.ROW), part, shape)
    offs_n = gl.expand_dims(key + gl.arange(0, KEYS, gl.SliceLayout(1, shape.MMA)), 1)
    return gl.where(visible(item.seq_len - item.q_len + q_row, offs_n, past, 0, shape), s, -float("inf"))
