// Elements that are moved from anywhere to anywhere, parts of matrices, and numbers that rise.

constexpr int DIMS = 8, OPERANDS = 2;

// Sizes are in elements. Dimension 0 is the outermost. Operand 0 is the source, or a number where its address is 0; 1 is the target.
struct Move {
  u64 x, y, number[2];
  i64 size, dims, lengths[DIMS], steps[OPERANDS][DIMS];
};

template <class I> DEVICE void locate(const Move& m, I i, i64& from, i64& to) {
#pragma unroll 1
  for (int d = (int)m.dims - 1; d > 0; --d) {
    const I next = i / (I)m.lengths[d];
    const i64 place = (i64)(i - next * (I)m.lengths[d]);
    from += place * m.steps[0][d], to += place * m.steps[1][d];
    i = next;
  }
  from += (i64)i * m.steps[0][0], to += (i64)i * m.steps[1][0];
}

template <class T> DEVICE void move(const Move& m) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m.size) return;
  i64 from = 0, to = 0;
  if (m.size <= 0x7fffffffll) locate(m, (u32)i, from, to);
  else locate(m, (u64)i, from, to);
  ((T*)m.y)[to] = ((const T*)(m.x ? m.x : (u64)m.number))[from];
}

// Keeps what is on the k-th diagonal, and on one side of it.
template <class T> DEVICE void triangle(const T* x, T* y, i64 size, i64 rows, i64 columns, i64 k, i64 is_lower) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const i64 diagonal = i % columns - i / columns % rows;
  y[i] = (is_lower ? diagonal <= k : diagonal >= k) ? x[i] : T{};
}

// Floats are computed in double and rounded once; integers wrap.
template <class T> DEVICE void ramp(T* y, i64 size, u64 start, u64 step, u64 last, i64 has_last) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  if constexpr (Kind<T>::integer) y[i] = (T)(start + (u64)i * step);
  else {
    const double exact = has_last && i == size - 1 ? __longlong_as_double((i64)last) : (double)i * __longlong_as_double((i64)step) + __longlong_as_double((i64)start);
    y[i] = narrow<T>(exact);
  }
}

// -- padding with elements of x

constexpr i64 EDGE = 0, REFLECT = 1, SYMMETRIC = 2;  // else the other end
struct Frame {
  u64 x, y;
  i64 size, dims, mode, lengths[DIMS], before[DIMS], inner[DIMS], steps[DIMS];  // inner: lengths of x, and steps in it
};

// Returns which element of an axis stands at a place before, in or behind it.
DEVICE i64 within(i64 place, i64 length, i64 mode) {
  if (place >= 0 && place < length) return place;
  if (mode == EDGE || length == 1) return place < 0 ? 0 : length - 1;
  const i64 period = mode == REFLECT ? 2 * (length - 1) : mode == SYMMETRIC ? 2 * length : length;
  i64 rest = place % period;
  if (rest < 0) rest += period;
  return rest < length ? rest : (mode == REFLECT ? period : period - 1) - rest;
}
template <class I> DEVICE i64 source_of(const Frame& f, I i) {
  i64 from = 0;
#pragma unroll 1
  for (int d = (int)f.dims - 1; d >= 0; --d) {
    const I next = i / (I)f.lengths[d];
    from += within((i64)(i - next * (I)f.lengths[d]) - f.before[d], f.inner[d], f.mode) * f.steps[d];
    i = next;
  }
  return from;
}
template <class T> DEVICE void pad(const Frame& f) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= f.size) return;
  ((T*)f.y)[i] = ((const T*)f.x)[f.size <= 0x7fffffffll ? source_of(f, (u32)i) : source_of(f, (u64)i)];
}

// -- elements at indices: x is [before, length, behind], and the indices' elements are [before, count, behind]

constexpr i64 RAISE = 0, WRAP = 1, NOWHERE = -0x7fffffffffffffffll;
struct Spots {
  u64 x, indices, others, number[2], status;  // others: 0 for a number
  i64 size, length, behind, count, steps[3], places[3], mode;  // places: how far elements of x lie apart
};

// Returns where in x element i of the indices' is, or NOWHERE if its index is out of range, which is told by the status.
template <class I> DEVICE i64 spot(const Spots& s, i64 i) {
  i64 rest, behind, before, place;
  if (s.size <= 0x7fffffffll) {
    const u32 r = (u32)i / (u32)s.behind, b = r / (u32)s.count;
    rest = r, behind = (u32)i - r * (u32)s.behind, before = b, place = r - b * (u32)s.count;
  } else {
    rest = i / s.behind, behind = i - rest * s.behind, before = rest / s.count, place = rest - before * s.count;
  }
  i64 index = ((const I*)s.indices)[before * s.steps[0] + place * s.steps[1] + behind * s.steps[2]];
  if (s.mode == WRAP) {
    index %= s.length;
    if (index < 0) index += s.length;
  } else if (s.mode != RAISE) {
    index = min(max(index, 0ll), s.length - 1);
  } else if (index < -s.length || index >= s.length) {
    ((i64*)s.status)[1] = index, ((i64*)s.status)[0] = 1;
    return NOWHERE;
  } else if (index < 0) {
    index += s.length;
  }
  return before * s.places[0] + index * s.places[1] + behind * s.places[2];
}
DEVICE i64 thread_of(const Spots& s) { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

template <class T, class I> DEVICE void gather(const Spots& s) {
  const i64 i = thread_of(s);
  if (i >= s.size) return;
  const i64 at = spot<I>(s, i);
  ((T*)s.others)[i] = at == NOWHERE ? T{} : ((const T*)s.x)[at];
}
template <class T> DEVICE T other(const Spots& s, i64 i) { return s.others ? ((const T*)s.others)[i] : *(const T*)s.number; }
template <class T, class I> DEVICE void put(const Spots& s) {
  const i64 i = thread_of(s);
  if (i >= s.size) return;
  const i64 at = spot<I>(s, i);
  if (at != NOWHERE) ((T*)s.x)[at] = other<T>(s, i);
}
template <class T> DEVICE void accumulate(T* p, T x) { atomicAdd(p, x); }
DEVICE void accumulate(f16* p, f16 x) {
  u16 before;
  asm volatile("atom.add.noftz.f16 %0, [%1], %2;" : "=h"(before) : "l"(p), "h"(x.bits) : "memory");
}
DEVICE void accumulate(bf16* p, bf16 x) {
#if __CUDA_ARCH__ >= 900
  u16 before;
  asm volatile("atom.add.noftz.bf16 %0, [%1], %2;" : "=h"(before) : "l"(p), "h"(x.bits) : "memory");
#else
  for (u16 old = *(volatile u16*)p, seen;; old = seen) {
    seen = atomicCAS((u16*)p, old, narrow<bf16>(widen(bf16{old}) + widen(x)).bits);
    if (seen == old) return;
  }
#endif
}
// Integers of 64 bits are added without a sign: sums wrap.
template <class T, class I> DEVICE void scatter(const Spots& s) {
  const i64 i = thread_of(s);
  if (i >= s.size) return;
  const i64 at = spot<I>(s, i);
  if (at != NOWHERE) accumulate((T*)s.x + at, other<T>(s, i));
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name
#define MOVE(bytes, T)                                                                  \
  KERNEL(move_##bytes)(const __grid_constant__ Move m) { move<T>(m); }                  \
  KERNEL(pad_##bytes)(const __grid_constant__ Frame f) { pad<T>(f); }                   \
  KERNEL(triangle_##bytes)(const T* x, T* y, i64 n, i64 rows, i64 columns, i64 k, i64 is_lower) { triangle<T>(x, y, n, rows, columns, k, is_lower); }
#define RAMP(T) KERNEL(ramp_##T)(T* y, i64 n, u64 start, u64 step, u64 last, i64 has_last) { ramp<T>(y, n, start, step, last, has_last); }

MOVE(1, u8) MOVE(2, u16) MOVE(4, u32) MOVE(8, u64) MOVE(16, c128)
RAMP(f16) RAMP(bf16) RAMP(f32) RAMP(f64) RAMP(i8) RAMP(i16) RAMP(i32) RAMP(i64) RAMP(u8) RAMP(u16) RAMP(u32) RAMP(u64)

#define SPOTS(kind, name, T)                                                                   \
  KERNEL(kind##_##name##_i32)(const __grid_constant__ Spots s) { kind<T, i32>(s); }            \
  KERNEL(kind##_##name##_i64)(const __grid_constant__ Spots s) { kind<T, i64>(s); }
#define EVERY(kind) SPOTS(kind, 1, u8) SPOTS(kind, 2, u16) SPOTS(kind, 4, u32) SPOTS(kind, 8, u64) SPOTS(kind, 16, c128)
EVERY(gather) EVERY(put)
SPOTS(scatter, f16, f16) SPOTS(scatter, bf16, bf16) SPOTS(scatter, f32, f32) SPOTS(scatter, f64, f64) SPOTS(scatter, u32, u32) SPOTS(scatter, u64, u64)
