// Reductions of a C-contiguous [outer, length, inner] array along its middle axis.
//
// group:  inner == 1 and short rows; a power of two of neighbouring threads takes one row.
// rows:   inner == 1 and long rows; a block takes one chunk of one row.
// each:   inner > 1 and many results; a thread takes one.
// column: inner > 1 and few; threads next to each other take columns next to each other, a block takes one chunk of the axis.
// With more than one chunk (gridDim.y), rows and column leave unscaled partial results [chunks, outer * inner] in the accumulator's type,
// which a second launch of the column kernel finishes.

template <class T> struct Sums { typedef typename Wide<T>::type type; };
#define SUMS(T, W) template <> struct Sums<T> { typedef W type; };
SUMS(i8, u32) SUMS(u8, u32) SUMS(i16, u32) SUMS(u16, u32) SUMS(i32, u32) SUMS(i64, u64)
template <class T> struct Extremes { typedef typename Wide<T>::type type; };
#define EXTREMES(T, W) template <> struct Extremes<T> { typedef W type; };
EXTREMES(i8, i32) EXTREMES(i16, i32) EXTREMES(u8, u32) EXTREMES(u16, u32)

template <class W> struct Limits;
#define LIMITS(W, least, most) \
  template <> struct Limits<W> { static DEVICE W low() { return least; } static DEVICE W high() { return most; } };
LIMITS(f32, -__int_as_float(0x7f800000), __int_as_float(0x7f800000))
LIMITS(f64, -__longlong_as_double(0x7ff0000000000000ll), __longlong_as_double(0x7ff0000000000000ll))
LIMITS(i32, (-2147483647 - 1), 2147483647)
LIMITS(u32, 0u, 4294967295u)
LIMITS(i64, (-9223372036854775807ll - 1), 9223372036854775807ll)
LIMITS(u64, 0ull, 18446744073709551615ull)

struct Sum {
  template <class T> using Accumulator = typename Sums<T>::type;
  template <class W> static DEVICE W identity() { return W{}; }
  template <class W> static DEVICE W of(W a, W b) { return add(a, b); }
};
struct Max {
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::low(); }
  template <class W> static DEVICE W of(W a, W b) { return larger(a, b); }
};
struct Min {
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::high(); }
  template <class W> static DEVICE W of(W a, W b) { return smaller(a, b); }
};

template <class W, class T> DEVICE W load(T x) {
  if constexpr (Kind<T>::complex) return x;
  else return (W)widen(x);
}
template <class T, class W> DEVICE void finish(T* y, W value, i64 divisor) {
  if (divisor) {
    if constexpr (Kind<W>::complex) { value.re /= divisor; value.im /= divisor; }
    else if constexpr (!Kind<W>::integer) value /= (W)divisor;
  }
  *y = narrow<T>(value);
}
template <class W> DEVICE W shuffle(W value, int offset) {
  W other;
  const int* from = (const int*)&value;
  int* to = (int*)&other;
#pragma unroll
  for (int k = 0; k < (int)(sizeof(W) / 4); ++k) to[k] = __shfl_xor_sync(0xffffffffu, from[k], offset);
  return other;
}

template <class Op, class T> DEVICE void group(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 width, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / width;
  int lane = threadIdx.x & (width - 1);
  W acc = Op::template identity<W>();
  if (row < rows) {
    const T* start = x + row * length;
    constexpr int N = Lanes<T>::count;
    if (length % N == 0 && aligned16(x)) {
      const Pack<T, N>* packed = (const Pack<T, N>*)start;
#pragma unroll 2
      for (i64 p = lane; p < length / N; p += width) {
        Pack<T, N> each = packed[p];
#pragma unroll
        for (int k = 0; k < N; ++k) acc = Op::of(acc, load<W>(each.v[k]));
      }
    } else {
#pragma unroll 4
      for (i64 i = lane; i < length; i += width) acc = Op::of(acc, load<W>(start[i]));
    }
  }
  for (int offset = width / 2; offset; offset /= 2) acc = Op::of(acc, shuffle(acc, offset));
  if (lane == 0 && row < rows) finish(y + row, acc, divisor);
}

template <class Op, class T> DEVICE void rows(const T* __restrict__ x, T* y, i64 length, i64 chunk, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr int N = Lanes<T>::count;
  i64 start = (i64)blockIdx.y * chunk, end = min(start + chunk, length), i = start;
  const T* row = x + (i64)blockIdx.x * length;
  W acc = Op::template identity<W>();
  // Scalars up to the first address that a pack can be loaded from.
  i64 head = min(end - start, (i64)((16 - ((u64)(row + start) & 15)) % 16 / sizeof(T)));
  if (threadIdx.x < head) acc = load<W>(row[start + threadIdx.x]);
  start += head, i = start;
  if (aligned16(row + start)) {
    i64 packs = (end - start) / N;
    const Pack<T, N>* packed = (const Pack<T, N>*)(row + start);
#pragma unroll 2
    for (i64 p = threadIdx.x; p < packs; p += blockDim.x) {
      Pack<T, N> each = packed[p];
#pragma unroll
      for (int k = 0; k < N; ++k) acc = Op::of(acc, load<W>(each.v[k]));
    }
    i = start + packs * N;
  }
#pragma unroll 4
  for (i += threadIdx.x; i < end; i += blockDim.x) acc = Op::of(acc, load<W>(row[i]));
  __shared__ alignas(16) char storage[32 * sizeof(W)];
  W* sums = (W*)storage;
  for (int offset = 16; offset; offset /= 2) acc = Op::of(acc, shuffle(acc, offset));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = acc;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  acc = threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : Op::template identity<W>();
  for (int offset = 16; offset; offset /= 2) acc = Op::of(acc, shuffle(acc, offset));
  if (threadIdx.x) return;
  if (gridDim.y > 1) ((W*)y)[(i64)blockIdx.y * gridDim.x + blockIdx.x] = acc;
  else finish(y + blockIdx.x, acc, divisor);
}

// V neighbouring results a thread; V > 1 where the rows are aligned.
template <int V, class Op, class T> DEVICE void each(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  i64 out = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V;
  if (out >= outer * inner) return;
  const T* base = x + out / inner * length * inner + out % inner;
  W acc[V];
#pragma unroll
  for (int k = 0; k < V; ++k) acc[k] = Op::template identity<W>();
#pragma unroll 4
  for (i64 i = 0; i < length; ++i) {
    Pack<T, V> part = *(const Pack<T, V>*)(base + i * inner);
#pragma unroll
    for (int k = 0; k < V; ++k) acc[k] = Op::of(acc[k], load<W>(part.v[k]));
  }
#pragma unroll
  for (int k = 0; k < V; ++k) finish(y + out + k, acc[k], divisor);
}

// In is T, or the accumulator's type where partial results are finished.
template <int V, class Op, class In, class T>
DEVICE void column(const In* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 tiles, i64 chunk, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  i64 o = blockIdx.x / tiles, c = ((blockIdx.x % tiles) * blockDim.x + threadIdx.x) * V;
  i64 start = (i64)blockIdx.y * chunk, end = min(start + chunk, length);
  W acc[V];
#pragma unroll
  for (int k = 0; k < V; ++k) acc[k] = Op::template identity<W>();
  if (c < inner) {
    const In* base = x + o * length * inner + c;
#pragma unroll 4
    for (i64 i = start + threadIdx.y; i < end; i += blockDim.y) {
      Pack<In, V> part = *(const Pack<In, V>*)(base + i * inner);
#pragma unroll
      for (int k = 0; k < V; ++k) acc[k] = Op::of(acc[k], load<W>(part.v[k]));
    }
  }
  __shared__ alignas(16) char storage[256 * sizeof(W)];
  W* sums = (W*)storage;
  int place = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    __syncthreads();
    sums[place] = acc[k];
    for (int height = blockDim.y / 2; height; height /= 2) {
      __syncthreads();
      if (threadIdx.y < height) sums[place] = Op::of(sums[place], sums[place + height * blockDim.x]);
    }
    if (threadIdx.y || c >= inner) continue;
    i64 out = o * inner + c + k;
    if (gridDim.y > 1) ((W*)y)[(i64)blockIdx.y * outer * inner + out] = sums[place];
    else finish(y + out, sums[place], divisor);
  }
}

#define REDUCE(name, Op, T)                                                                                                      \
  extern "C" __global__ void reduce_group_##name##_##T(const T* x, T* y, i64 rows, i64 length, i64 width, i64 divisor) {          \
    group<Op>(x, y, rows, length, width, divisor);                                                                               \
  }                                                                                                                              \
  extern "C" __global__ void reduce_rows_##name##_##T(const T* x, T* y, i64 length, i64 chunk, i64 divisor) {                     \
    rows<Op>(x, y, length, chunk, divisor);                                                                                      \
  }                                                                                                                              \
  extern "C" __global__ void reduce_each_##name##_##T(const T* x, T* y, i64 outer, i64 length, i64 inner, i64 divisor) {          \
    each<1, Op>(x, y, outer, length, inner, divisor);                                                                            \
  }                                                                                                                              \
  extern "C" __global__ void reduce_each_packed_##name##_##T(const T* x, T* y, i64 outer, i64 length, i64 inner, i64 divisor) {   \
    each<Lanes<T>::count, Op>(x, y, outer, length, inner, divisor);                                                              \
  }                                                                                                                              \
  extern "C" __global__ void reduce_column_##name##_##T(const T* x, T* y, i64 o, i64 l, i64 i, i64 tiles, i64 chunk, i64 divisor) {\
    column<1, Op>(x, y, o, l, i, tiles, chunk, divisor);                                                                         \
  }                                                                                                                              \
  extern "C" __global__ void reduce_column_packed_##name##_##T(const T* x, T* y, i64 o, i64 l, i64 i, i64 tiles, i64 chunk,        \
                                                               i64 divisor) {                                                    \
    column<Lanes<T>::count, Op>(x, y, o, l, i, tiles, chunk, divisor);                                                           \
  }                                                                                                                              \
  extern "C" __global__ void reduce_finish_##name##_##T(const Op::Accumulator<T>* x, T* y, i64 o, i64 l, i64 i, i64 tiles,         \
                                                        i64 chunk, i64 divisor) {                                                \
    column<1, Op>(x, y, o, l, i, tiles, chunk, divisor);                                                                         \
  }
