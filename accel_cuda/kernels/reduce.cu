// Reductions of a C-contiguous [outer, length, inner] array along its middle axis.
//
// group:  inner == 1 and rows of whole packs, not long; a power of two of neighbouring threads takes one row.
// brief:  inner == 1 and any other rows that are not long; a block brings some of them into shared memory, granule by granule.
// rows:   inner == 1 and long rows; a block takes one chunk of one row.
// slices: inner > 1, and small [length, inner] slices; a block brings some of them into shared memory.
// strips: inner is small and length is not; a block brings pieces of one slice into shared memory, one after the other.
// each:   inner is large, and so is the number of results; a thread takes as many as make 16 bytes.
// column: inner is large, and results are few; threads next to each other take columns next to each other, a block takes one chunk of the axis.
// With more than one chunk (gridDim.y), rows, strips and column leave unscaled partial results [chunks, outer * inner] in the accumulator's type,
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
  static constexpr bool is_sum = true;
  template <class T> using Accumulator = typename Sums<T>::type;
  template <class W> static DEVICE W identity() { return W{}; }
  template <class W> static DEVICE W of(W a, W b) { return add(a, b); }
};
struct Max {
  static constexpr bool is_sum = false;
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::low(); }
  template <class W> static DEVICE W of(W a, W b) { return larger(a, b); }
};
struct Min {
  static constexpr bool is_sum = false;
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::high(); }
  template <class W> static DEVICE W of(W a, W b) { return smaller(a, b); }
};

template <class W, class T> DEVICE W load(T x) {
  if constexpr (Kind<T>::complex) return x;
  else return (W)widen(x);
}
// What a sum is divided by, made once a thread; 0 stands for nothing.
template <class W> struct Divisor { typedef W type; };
template <class R> struct Divisor<Complex<R>> { typedef R type; };
template <class W> DEVICE typename Divisor<W>::type divisor_of(i64 divisor) { return (typename Divisor<W>::type)divisor; }
template <class T, class W> DEVICE void finish(T* y, W value, typename Divisor<W>::type divisor) {
  if constexpr (Kind<W>::complex) {
    if (divisor != 0) value.re /= divisor, value.im /= divisor;
  } else if constexpr (!Kind<W>::integer) {
    if (divisor != 0) value /= divisor;
  }
  *y = narrow<T>(value);
}
// The elements of a pack into one accumulator. Sums of bytes are kept to their last 8 bits, signed or not.
template <class Op, class T, class W, int N> DEVICE void absorb(W& to, const Pack<T, N>& pack) {
  if constexpr (Op::is_sum && sizeof(T) == 1 && N % 4 == 0) {
    const u32* words = (const u32*)&pack;
#pragma unroll
    for (int k = 0; k < N / 4; ++k) to = __dp4a(words[k], 0x01010101u, (u32)to);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) to = Op::of(to, load<W>(pack.v[k]));
  }
}
template <class W> DEVICE W shuffle(W value, int offset) {
  W other;
  const int* from = (const int*)&value;
  int* to = (int*)&other;
#pragma unroll
  for (int k = 0; k < (int)(sizeof(W) / 4); ++k) to[k] = __shfl_xor_sync(0xffffffffu, from[k], offset);
  return other;
}

// -- inner == 1

template <class Op, class T> DEVICE void group(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 shift, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 N = Lanes<T>::count;
  const u32 width = 1u << shift, lane = threadIdx.x & (width - 1), packs = (u32)length / N;
  const i64 row = (i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
  W acc = Op::template identity<W>();
  if (row < rows) {
    const Pack<T, N>* packed = (const Pack<T, N>*)(x + row * length);
#pragma unroll 4
    for (u32 p = lane; p < packs; p += width) absorb<Op>(acc, load_whole<T>(packed + p));
  }
  for (u32 offset = width / 2; offset; offset /= 2) acc = Op::of(acc, shuffle(acc, offset));
  if (lane == 0 && row < rows) finish(y + row, acc, divisor_of<W>(divisor));
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
#pragma unroll 4
    for (i64 p = threadIdx.x; p < packs; p += blockDim.x) {
      absorb<Op>(acc, load_whole<T>(packed + p));
    }
    i = start + packs * N;
  }
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
  else finish(y + blockIdx.x, acc, divisor_of<W>(divisor));
}

// -- through shared memory

constexpr u32 TILE = 24576, THREADS = 256;

// Begin to bring `count` elements from `x` on into shared memory, and return the offset in bytes at which the first of them will lie there.
// `begin` and `end` are the array's: granules that do not lie in it are cut.
template <class T> DEVICE u32 stage(char* tile, const T* x, u32 count, u64 begin, u64 end) {
  u64 base = (u64)x & ~15ull;
  u32 granules = count ? (u32)(((u64)(x + count) + 15 - base) / 16) : 0;
  for (u32 g = threadIdx.x; g < granules; g += THREADS) {
    u64 from = base + 16ull * g;
    if (from < begin || from + 16 > end) {
      *(Quad*)(tile + 16 * g) = load_cut<T>(from, begin, end);
      continue;
    }
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(tile + 16 * g)), "l"(from) : "memory");
#else
    *(Quad*)(tile + 16 * g) = load_quad((const void*)from);
#endif
  }
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  return (u32)((u64)x - base);
}
// Wait until all but the last `begun` tiles are there.
template <int begun> DEVICE void arrive() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(begun) : "memory");
#endif
  __syncthreads();
}

// As many elements as make 4 bytes, or one: what is read from shared memory at once, from the offset of any element.
template <class T> struct Few { static constexpr int count = sizeof(T) >= 4 ? 1 : 4 / sizeof(T); };
template <class T> DEVICE Pack<T, Few<T>::count> few(const char* tile, u32 offset) {
  if constexpr (sizeof(T) >= 4) {
    return *(const Pack<T, 1>*)(tile + offset);
  } else {
    const u32* words = (const u32*)(tile + (offset & ~3u));
    u32 word = __funnelshift_r(words[0], words[1], offset % 4 * 8);
    return *(const Pack<T, Few<T>::count>*)&word;
  }
}

template <class Op, class T> DEVICE void brief(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 per_block, i64 shift, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 E = Few<T>::count, SIZE = sizeof(T);
  __shared__ alignas(16) char tile[TILE + 48];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, rows - first), many = (u32)length, rest = many % E, width = 1u << shift, lane = threadIdx.x & (width - 1);
  const u32 at = stage(tile, x + first * length, mine * many, (u64)x, (u64)(x + rows * length)), full = (many - rest) * SIZE;
  const bool ends = rest && lane == (many / E & (width - 1));
  const auto scale = divisor_of<W>(divisor);
  arrive<0>();
  u32 row = threadIdx.x >> shift, place = at + row * many * SIZE;
  const u32 rows_at_once = THREADS >> shift, step = rows_at_once * many * SIZE;
  y += first;
  for (u32 row0 = 0; row0 < mine; row0 += rows_at_once, row += rows_at_once, place += step) {
    W acc = Op::template identity<W>();
    if (row < mine) {
      const u32 end = place + full;
#pragma unroll 4
      for (u32 p = place + lane * (E * SIZE); p < end; p += width * (E * SIZE)) absorb<Op>(acc, few<T>(tile, p));
      if (E > 1 && ends) {
        Pack<T, E> part = few<T>(tile, end);
#pragma unroll
        for (u32 k = 0; k + 1 < E; ++k)
          if (k < rest) acc = Op::of(acc, load<W>(part.v[k]));
      }
    }
    for (u32 offset = width / 2; offset; offset /= 2) acc = Op::of(acc, shuffle(acc, offset));
    if (lane == 0 && row < mine) finish(y + row, acc, scale);
  }
}

template <class Op, class T>
DEVICE void slices(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 per_block, i64 shift, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 E = Few<T>::count;
  __shared__ alignas(16) char tile[TILE + 48];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, outer - first), many = (u32)length, columns = (u32)inner, size = many * columns;
  const u32 lanes = 1u << shift, lane = threadIdx.x & (lanes - 1), groups = (columns + E - 1) / E, inverse = 0xffffffffu / groups + 1;
  const u32 at = stage(tile, x + first * size, mine * size, (u64)x, (u64)(x + outer * size)), step = lanes * columns * (u32)sizeof(T);
  const auto scale = divisor_of<W>(divisor);
  arrive<0>();
  for (u32 group0 = 0; group0 < mine * groups; group0 += THREADS >> shift) {
    u32 group = group0 + (threadIdx.x >> shift);
    // The quotient by multiplication is exact for groups below 2^16.
    u32 slice = groups == 1 ? group : __umulhi(group, inverse), column = (group - slice * groups) * E;
    bool is_mine = group < mine * groups;
    W acc[E];
#pragma unroll
    for (u32 k = 0; k < E; ++k) acc[k] = Op::template identity<W>();
    if (is_mine) {
      u32 place = at + (slice * size + lane * columns + column) * (u32)sizeof(T);
#pragma unroll 4
      for (u32 i = lane; i < many; i += lanes, place += step) {
        Pack<T, E> part = few<T>(tile, place);
#pragma unroll
        for (u32 k = 0; k < E; ++k) acc[k] = Op::of(acc[k], load<W>(part.v[k]));
      }
    }
#pragma unroll
    for (u32 k = 0; k < E; ++k) {
      for (u32 offset = lanes / 2; offset; offset /= 2) acc[k] = Op::of(acc[k], shuffle(acc[k], offset));
      if (is_mine && lane == 0 && column + k < columns) finish(y + (first + slice) * inner + column + k, acc[k], scale);
    }
  }
}

template <class Op, class T> DEVICE void strips(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 chunk, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 E = Few<T>::count, HALF = TILE / 2;
  __shared__ alignas(16) char tile[2][HALF + 48];
  const u32 columns = (u32)inner, groups = (columns + E - 1) / E, height = THREADS / groups, row = threadIdx.x / groups;
  const u32 column = (threadIdx.x - row * groups) * E, per_tile = HALF / (columns * (u32)sizeof(T));
  const i64 start = (i64)blockIdx.y * chunk, end = min(start + chunk, length);
  const u32 own = (row * columns + column) * (u32)sizeof(T), step = height * columns * (u32)sizeof(T);
  W acc[E];
#pragma unroll
  for (u32 k = 0; k < E; ++k) acc[k] = Op::template identity<W>();
  const T* from = x + (blockIdx.x * length + start) * inner;
  const u64 first = (u64)x, last = (u64)(x + outer * length * inner);
  u32 mine = (u32)min((i64)per_tile, end - start), at = stage(tile[0], from, mine * columns, first, last), side = 0;
  for (i64 row0 = start; row0 < end; row0 += per_tile, side ^= 1) {
    // The next tile is on its way while this one is added up.
    from += per_tile * columns;
    const u32 next = (u32)max(0ll, min((i64)per_tile, end - row0 - per_tile)), next_at = stage(tile[side ^ 1], from, next * columns, first, last);
    arrive<1>();
    if (row < height) {
      u32 place = at + own;
#pragma unroll 4
      for (u32 i = row; i < mine; i += height, place += step) {
        Pack<T, E> part = few<T>(tile[side], place);
#pragma unroll
        for (u32 k = 0; k < E; ++k) acc[k] = Op::of(acc[k], load<W>(part.v[k]));
      }
    }
    __syncthreads();
    mine = next, at = next_at;
  }
  W* sums = (W*)tile[0];
#pragma unroll
  for (u32 k = 0; k < E; ++k) sums[threadIdx.x * E + k] = acc[k];
  for (u32 high = height; high > 1;) {
    u32 half = (high + 1) / 2;
    __syncthreads();
    if (row < high - half)
#pragma unroll
      for (u32 k = 0; k < E; ++k) sums[threadIdx.x * E + k] = Op::of(sums[threadIdx.x * E + k], sums[(threadIdx.x + half * groups) * E + k]);
    high = half;
  }
  if (row) return;
#pragma unroll
  for (u32 k = 0; k < E; ++k) {
    if (column + k >= columns) continue;
    i64 out = blockIdx.x * inner + column + k;
    if (gridDim.y > 1) ((W*)y)[(i64)blockIdx.y * outer * inner + out] = sums[threadIdx.x * E + k];
    else finish(y + out, sums[threadIdx.x * E + k], divisor_of<W>(divisor));
  }
}

// -- large inner

template <class T> DEVICE Pack<T, Lanes<T>::count> load_inside(const T* p) {
  u64 address = (u64)p;
  return joined<T>(load_quad((const void*)(address & ~15ull)), load_quad((const void*)((address + 15) & ~15ull)), (u32)address & 15);
}
enum Where { ALIGNED, INSIDE, AT_THE_EDGE };
// V elements next to each other; at the edge not all of them need lie in the array.
template <int V, Where where, class In> DEVICE Pack<In, V> some(const In* p, u64 first, u64 last) {
  if constexpr (where == ALIGNED && V == Lanes<In>::count) return load_whole<In>(p);
  else if constexpr (where == ALIGNED) return *(const Pack<In, V>*)p;
  else if constexpr (where == INSIDE) return load_inside<In>(p);
  else return load_part<In>(p, first, last);
}
template <int V, Where where, class Op, class In, class W>
DEVICE void down(W (&acc)[V], const In* base, i64 begin, i64 end, i64 step, i64 inner, u64 first, u64 last) {
  // Four rows are on their way at a time, also at the end, where the last one is read again and not used.
  for (i64 row = begin; row < end; row += 4 * step) {
    Pack<In, V> part[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) part[j] = some<V, where>(base + min(row + j * step, end - 1) * inner, first, last);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row + j * step >= end) break;
#pragma unroll
      for (int k = 0; k < V; ++k) acc[k] = Op::of(acc[k], load<W>(part[j].v[k]));
    }
  }
}
template <int V, bool is_odd, class Op, class In, class W>
DEVICE void down(W (&acc)[V], const In* base, i64 begin, i64 end, i64 step, i64 inner, bool is_inside, u64 first, u64 last) {
  if constexpr (!is_odd) down<V, ALIGNED, Op>(acc, base, begin, end, step, inner, first, last);
  else if (is_inside) down<V, INSIDE, Op>(acc, base, begin, end, step, inner, first, last);
  else down<V, AT_THE_EDGE, Op>(acc, base, begin, end, step, inner, first, last);
}

template <bool is_odd, class Op, class T>
DEVICE void each(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 groups, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr int V = Lanes<T>::count;
  i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x, o;
  if (place >= outer * groups) return;
  if (outer == 1) o = 0;
  else if (outer * groups <= 0xffffffffll) o = (u32)place / (u32)groups;
  else o = place / groups;
  // The results are cut where they can be stored as packs.
  i64 column = (place - o * groups) * V;
  if constexpr (is_odd) column -= (i64)(((u64)(y + o * inner) & 15) / sizeof(T));
  if (column >= inner) return;
  const u64 first = (u64)x, last = (u64)(x + outer * length * inner);
  const T* base = x + o * length * inner + column;
  W acc[V];
#pragma unroll
  for (int k = 0; k < V; ++k) acc[k] = Op::template identity<W>();
  // What is read beside a pack lies in the array, but for that of its first and last packs.
  const bool is_inside = (o > 0 || column >= V) && (o + 1 < outer || column + 2 * V <= inner);
  down<V, is_odd, Op>(acc, base, 0, length, 1, inner, is_inside, first, last);
  const auto scale = divisor_of<W>(divisor);
  Pack<T, V> result;
#pragma unroll
  for (int k = 0; k < V; ++k) finish(&result.v[k], acc[k], scale);
  T* out = y + o * inner + column;
  if (column >= 0 && column + V <= inner) {
    *(Pack<T, V>*)out = result;
  } else {
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (column + k >= 0 && column + k < inner) out[k] = result.v[k];
  }
}

// In is T, or the accumulator's type where partial results are finished.
template <int V, bool is_odd, class Op, class In, class T>
DEVICE void column(const In* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 tiles, i64 chunk, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  i64 o = blockIdx.x / tiles, c = ((blockIdx.x % tiles) * blockDim.x + threadIdx.x) * V;
  i64 start = (i64)blockIdx.y * chunk, end = min(start + chunk, length);
  const u64 first = (u64)x, last = (u64)(x + outer * length * inner);
  W acc[V];
#pragma unroll
  for (int k = 0; k < V; ++k) acc[k] = Op::template identity<W>();
  const bool is_inside = (o > 0 || c >= V) && (o + 1 < outer || c + 2 * V <= inner);
  if (c < inner) down<V, is_odd, Op>(acc, x + o * length * inner + c, start + threadIdx.y, end, blockDim.y, inner, is_inside, first, last);
  __shared__ alignas(16) char storage[V * 256 * sizeof(W)];
  W* sums = (W*)storage;
  int place = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < V; ++k) sums[k * 256 + place] = acc[k];
  for (int height = blockDim.y / 2; height; height /= 2) {
    __syncthreads();
    if (threadIdx.y < height) {
#pragma unroll
      for (int k = 0; k < V; ++k) sums[k * 256 + place] = Op::of(sums[k * 256 + place], sums[k * 256 + place + height * blockDim.x]);
    }
  }
  if (threadIdx.y) return;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    if (c + k >= inner) continue;
    i64 out = o * inner + c + k;
    if (gridDim.y > 1) ((W*)y)[(i64)blockIdx.y * outer * inner + out] = sums[k * 256 + place];
    else finish(y + out, sums[k * 256 + place], divisor_of<W>(divisor));
  }
}

#define KERNEL(kind, name, T) extern "C" __global__ void __launch_bounds__(256) reduce_##kind##_##name##_##T
#define REDUCE(name, Op, T)                                                                                                             \
  KERNEL(group, name, T)(const T* x, T* y, i64 rows, i64 length, i64 shift, i64 d) { group<Op>(x, y, rows, length, shift, d); }         \
  KERNEL(brief, name, T)(const T* x, T* y, i64 rows, i64 length, i64 some, i64 shift, i64 d) { brief<Op>(x, y, rows, length, some, shift, d); } \
  KERNEL(rows, name, T)(const T* x, T* y, i64 length, i64 chunk, i64 d) { rows<Op>(x, y, length, chunk, d); }                           \
  KERNEL(slices, name, T)(const T* x, T* y, i64 o, i64 l, i64 i, i64 some, i64 shift, i64 d) { slices<Op>(x, y, o, l, i, some, shift, d); } \
  KERNEL(strips, name, T)(const T* x, T* y, i64 o, i64 l, i64 i, i64 chunk, i64 d) { strips<Op>(x, y, o, l, i, chunk, d); }             \
  KERNEL(each, name, T)(const T* x, T* y, i64 o, i64 l, i64 i, i64 groups, i64 d) { each<false, Op>(x, y, o, l, i, groups, d); }        \
  KERNEL(each_odd, name, T)(const T* x, T* y, i64 o, i64 l, i64 i, i64 groups, i64 d) { each<true, Op>(x, y, o, l, i, groups, d); }     \
  KERNEL(column, name, T)(const T* x, T* y, i64 o, i64 l, i64 i, i64 tiles, i64 chunk, i64 d) {                                         \
    column<Lanes<T>::count, false, Op>(x, y, o, l, i, tiles, chunk, d);                                                                 \
  }                                                                                                                                     \
  KERNEL(column_odd, name, T)(const T* x, T* y, i64 o, i64 l, i64 i, i64 tiles, i64 chunk, i64 d) {                                     \
    column<Lanes<T>::count, true, Op>(x, y, o, l, i, tiles, chunk, d);                                                                  \
  }                                                                                                                                     \
  KERNEL(finish, name, T)(const Op::Accumulator<T>* x, T* y, i64 o, i64 l, i64 i, i64 tiles, i64 chunk, i64 d) {                        \
    column<1, false, Op>(x, y, o, l, i, tiles, chunk, d);                                                                               \
  }
