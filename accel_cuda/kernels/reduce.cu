// Reductions of a C-contiguous [outer, length, inner] array along its middle axis. What a kernel reads it brings into shared memory in granules of 16 bytes,
// whatever the shape is, and takes its elements from there: so neither the length nor the place of a row matters to the device's memory.
//
// brief:  inner == 1 and rows of a few bytes; a thread takes whole rows of those that its block brings.
// group:  inner == 1 and rows that are not long; a power of two of neighbouring threads takes each row, a granule at a time.
// rows:   inner == 1 and long rows; a block takes one chunk of one row, straight from the device's memory.
// slices: inner > 1, and small [length, inner] slices; a thread, or several neighbours, makes each result of those that its block brings.
// spans:  anything else; a block brings spans of 2 KiB at most, parts of rows or several rows in one, and a thread takes the same columns of all of them.
// With more than one chunk (gridDim.y), rows and spans leave unscaled partial results [chunks, outer * inner] in the accumulator's type, and
// finish:  makes results of them.

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

// The same for an element: integers that are computed in wider ones have limits of their own.
template <class T> DEVICE T lowest() {
  if constexpr (Kind<T>::integer && sizeof(T) < 4) return T(-1) < T(0) ? (T)(1u << (8 * sizeof(T) - 1)) : T(0);
  else return narrow<T>(Limits<typename Wide<T>::type>::low());
}
template <class T> DEVICE T highest() {
  if constexpr (Kind<T>::integer) return (T)~lowest<T>();
  else return narrow<T>(Limits<typename Wide<T>::type>::high());
}

struct Sum {
  static constexpr bool is_sum = true;
  template <class T> using Accumulator = typename Sums<T>::type;
  template <class W> static DEVICE W identity() { return W{}; }
  template <class T> static DEVICE T neutral() { return T{}; }
  template <class W> static DEVICE W of(W a, W b) { return add(a, b); }
};
struct Max {
  static constexpr bool is_sum = false;
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::low(); }
  template <class T> static DEVICE T neutral() { return lowest<T>(); }
  template <class W> static DEVICE W of(W a, W b) { return larger(a, b); }
};
struct Min {
  static constexpr bool is_sum = false;
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::high(); }
  template <class T> static DEVICE T neutral() { return highest<T>(); }
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

// -- long rows

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

// Begin to bring the granules from `base` on into shared memory, by `threads` threads of which this is one. `begin` and `end` are the array's: of what does
// not lie in it nothing is read.
template <class T> DEVICE void bring(char* tile, u64 base, u32 granules, u32 thread, u32 threads, u64 begin, u64 end) {
  if (base >= begin && base + 16ull * granules <= end) {
#pragma unroll 4
    for (u32 g = thread; g < granules; g += threads) {
#if __CUDA_ARCH__ >= 800
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(tile + 16 * g)), "l"(base + 16ull * g) : "memory");
#else
      *(Quad*)(tile + 16 * g) = load_quad((const void*)(base + 16ull * g));
#endif
    }
  } else {
    for (u32 g = thread; g < granules; g += threads) *(Quad*)(tile + 16 * g) = load_cut<T>(base + 16ull * g, begin, end);
  }
}
DEVICE void commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until all but the last `begun` tiles are there.
template <int begun> DEVICE void arrive() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(begun) : "memory");
#endif
  __syncthreads();
}
// Bring `count` elements from `x` on, and return the offset in bytes at which the first of them lies.
template <class T> DEVICE u32 stage(char* tile, const T* x, u32 count, u64 begin, u64 end) {
  u64 base = (u64)x & ~15ull;
  bring<T>(tile, base, (u32)(((u64)(x + count) + 15 - base) / 16), threadIdx.x, THREADS, begin, end);
  commit();
  arrive<0>();
  return (u32)((u64)x - base);
}
// N elements at a multiple of their size.
template <class T, int N> DEVICE Pack<T, N> take(const char* place) {
  if constexpr (N == 1) {
    return *(const Pack<T, 1>*)place;
  } else {
    u32 word = *(const u32*)place;
    return *(const Pack<T, N>*)&word;
  }
}

// Each thread takes four rows at a time, N elements of each.
template <int N, class Op, class T> DEVICE void brief(const char* tile, T* y, u32 rows, u32 length, typename Divisor<typename Op::template Accumulator<T>>::type scale) {
  typedef typename Op::template Accumulator<T> W;
  for (u32 row = threadIdx.x; row < rows; row += 4 * THREADS) {
    const char* place[4];
    W acc[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) place[j] = tile + min(row + j * THREADS, rows - 1) * length * (u32)sizeof(T), acc[j] = Op::template identity<W>();
#pragma unroll 4
    for (u32 k = 0; k < length / N; ++k)
#pragma unroll
      for (u32 j = 0; j < 4; ++j) absorb<Op>(acc[j], take<T, N>(place[j] + k * (u32)sizeof(T) * N));
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      if (row + j * THREADS < rows) finish(y + row + j * THREADS, acc[j], scale);
  }
}
template <class Op, class T> DEVICE void brief(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 per_block, i64 divisor) {
  constexpr int N = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  __shared__ alignas(16) char tile[TILE + 32];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, rows - first), many = (u32)length;
  const u32 at = stage(tile, x + first * length, mine * many, (u64)x, (u64)(x + rows * length));
  const auto scale = divisor_of<typename Op::template Accumulator<T>>(divisor);
  if (N > 1 && many % N == 0 && at % 4 == 0) brief<N, Op>(tile + at, y + first, mine, many, scale);
  else brief<1, Op>(tile + at, y + first, mine, many, scale);
}

// A granule whose first `bytes` bytes, or all but them, are replaced by what does not change a result.
template <class Op, class T> DEVICE Pack<T, Lanes<T>::count> cut(Quad all, u32 bytes, bool is_end) {
  Pack<T, Lanes<T>::count> nothing;
#pragma unroll
  for (int k = 0; k < Lanes<T>::count; ++k) nothing.v[k] = Op::template neutral<T>();
  const Quad& none = *(const Quad*)&nothing;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 kept = __funnelshift_lc(0, 0xffffffffu, (u32)max(0, (int)bytes * 8 - 32 * k)) ^ (is_end ? 0xffffffffu : 0);
    all.w[k] = (all.w[k] & kept) | (none.w[k] & ~kept);
  }
  return *(const Pack<T, Lanes<T>::count>*)&all;
}
// Rows of more than a granule.
template <class Op, class T> DEVICE void group(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 per_block, i64 shift, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  __shared__ alignas(16) char tile[TILE + 32];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, rows - first), bytes = (u32)length * (u32)sizeof(T), width = 1u << shift, lane = threadIdx.x & (width - 1);
  const u32 at = stage(tile, x + first * length, mine * (u32)length, (u64)x, (u64)(x + rows * length));
  const auto scale = divisor_of<W>(divisor);
  const Quad* granules = (const Quad*)tile;
  for (u32 row0 = 0; row0 < mine; row0 += THREADS >> shift) {
    const u32 row = row0 + (threadIdx.x >> shift), start = at + min(row, mine - 1) * bytes, end = start + bytes, head = start / 16, tail = (end - 1) / 16;
    W acc = Op::template identity<W>();
#pragma unroll 4
    for (u32 g = head + 1 + lane; g < tail; g += width) absorb<Op>(acc, *(const Pack<T, Lanes<T>::count>*)(granules + g));
    for (u32 is_end = lane; is_end < 2; is_end += width)
      absorb<Op>(acc, cut<Op, T>(granules[is_end ? tail : head], is_end ? end - 16 * tail : start % 16, is_end));
    for (u32 offset = width / 2; offset; offset /= 2) acc = Op::of(acc, shuffle(acc, offset));
    if (lane == 0 && row < mine) finish(y + first + row, acc, scale);
  }
}

// Each thread takes four results at a time; where `is_split` says so, neighbouring threads share a result's elements.
template <bool is_split, class Op, class T>
DEVICE void slices(const char* tile, T* y, u32 results, u32 length, u32 inner, u32 shift, typename Divisor<typename Op::template Accumulator<T>>::type scale) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 SIZE = sizeof(T);
  if constexpr (!is_split) shift = 0;
  const u32 lanes = 1u << shift, lane = threadIdx.x & (lanes - 1), at_once = THREADS >> shift, inverse = 0xffffffffu / inner + 1;
  const u32 step = lanes * inner * SIZE, further = (length - 1) * inner;
  for (u32 first = 0; first < results; first += 4 * at_once) {
    const u32 result = first + (threadIdx.x >> shift);
    u32 place[4];
    W acc[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      // The quotient by multiplication is exact for numbers below 2^16.
      u32 mine = min(result + j * at_once, results - 1), slice = inner == 1 ? mine : __umulhi(mine, inverse);
      place[j] = (mine + slice * further + lane * inner) * SIZE, acc[j] = Op::template identity<W>();
    }
#pragma unroll 2
    for (u32 k = lane; k < length; k += lanes)
#pragma unroll
      for (u32 j = 0; j < 4; ++j, place[j - 1] += step) absorb<Op>(acc[j], take<T, 1>(tile + place[j]));
    if constexpr (is_split)
      for (u32 offset = lanes / 2; offset; offset /= 2)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) acc[j] = Op::of(acc[j], shuffle(acc[j], offset));
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      if (lane == 0 && result + j * at_once < results) finish(y + result + j * at_once, acc[j], scale);
  }
}
template <class Op, class T>
DEVICE void slices(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 per_block, i64 shift, i64 divisor) {
  __shared__ alignas(16) char tile[TILE + 32];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, outer - first), size = (u32)(length * inner);
  const u32 at = stage(tile, x + first * size, mine * size, (u64)x, (u64)(x + outer * size));
  const auto scale = divisor_of<typename Op::template Accumulator<T>>(divisor);
  if (shift) slices<true, Op>(tile + at, y + first * inner, mine * (u32)inner, (u32)length, (u32)inner, (u32)shift, scale);
  else slices<false, Op>(tile + at, y + first * inner, mine * (u32)inner, (u32)length, (u32)inner, 0, scale);
}

constexpr u32 SPAN = 2048, SLOTS = 8, SLOT = SPAN + 16;
// What a block's threads need to know of a span: where it lies in its slot, how many elements it has, and, of a piece's last one, where the results belong.
struct alignas(16) Mark { u32 at, size; i64 out; };

// The spans of a block, in the order in which they are taken. A piece is `columns` columns wide, its spans hold `fold` rows each.
template <class T> struct Walk {
  const T* x;
  i64 length, inner, fold, tiles, columns, slice, tile;
  u32 first, count, row;
  DEVICE void skip(u32 many) {
    for (row += many; row >= count; row -= count)
      if (++tile == tiles) tile = 0, ++slice;
  }
  DEVICE const T* start() const { return x + (slice * length + (i64)(first + row) * fold) * inner + tile * columns; }
  // A piece's last tile may be narrower, and the last one of its spans may hold fewer rows.
  DEVICE Mark mark() const {
    i64 rows = min(fold, length - (i64)(first + row) * fold), out = slice * inner + tile * columns;
    return Mark{(u32)(u64)start() % 16, (u32)min(columns, rows * inner - tile * columns), row + 1 == count ? out : -1};
  }
};

template <class Op, class T>
DEVICE void spans(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 fold, i64 tiles, i64 columns, i64 each, i64 chunk, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 SIZE = sizeof(T), J = SPAN / SIZE > THREADS ? SPAN / SIZE / THREADS : 1;
  __shared__ alignas(16) char tile[2][SLOTS * SLOT];
  __shared__ Mark marks[2][SLOTS];
  const i64 piece = (i64)blockIdx.x * each, first = (i64)blockIdx.y * chunk;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Walk<T> walk{x, length, inner, fold, tiles, columns, piece / tiles, piece % tiles, (u32)first, (u32)min(chunk, (length + fold - 1) / fold - first), 0};
  const u32 total = (u32)min(each, outer * tiles - piece) * walk.count;
  const u64 begin = (u64)x, end = (u64)(x + outer * length * inner);
  walk.skip(warp);
  // Each warp brings every eighth span.
  auto bring_next = [&](u32 span, u32 side) {
    if (span < total) {
      const Mark mark = walk.mark();
      const u64 base = (u64)walk.start() & ~15ull;
      if (lane == 0) marks[side][warp] = mark;
      bring<T>(tile[side] + warp * SLOT, base, (mark.at + mark.size * SIZE + 15) / 16, lane, 32, begin, end);
      walk.skip(SLOTS);
    }
    commit();
  };
  auto deliver = [&](i64 out, W value) {
    if (gridDim.y > 1) ((W*)y)[(i64)blockIdx.y * outer * inner + out] = value;
    else finish(y + out, value, divisor_of<W>(divisor));
  };
  W acc[J];
#pragma unroll
  for (u32 j = 0; j < J; ++j) acc[j] = Op::template identity<W>();
  // With elements of 16 bytes half of the threads have none.
  const u32 own = min(threadIdx.x, SPAN / SIZE - 1) * SIZE, least = fold > 1 ? (u32)columns : 0;
  bring_next(warp, 0);
  for (u32 span = 0, side = 0; span < total; span += SLOTS, side ^= 1) {
    // The next tile is on its way while this one is taken.
    bring_next(span + SLOTS + warp, side ^ 1);
    arrive<1>();
    for (u32 slot = 0; slot < min(SLOTS, total - span); ++slot) {
      const Mark mark = marks[side][slot];
      const char* place = tile[side] + slot * SLOT + mark.at + own;
      // Beyond a row's end anything may be taken, for it is not delivered; beyond the last of the folded rows nothing may.
#pragma unroll
      for (u32 j = 0; j < J; ++j)
        if (mark.size >= least || threadIdx.x + j * THREADS < mark.size) absorb<Op>(acc[j], take<T, 1>(place + j * THREADS * SIZE));
      if (fold > 1 || mark.out < 0) continue;
#pragma unroll
      for (u32 j = 0; j < J; ++j) {
        if (threadIdx.x + j * THREADS < mark.size) deliver(mark.out + threadIdx.x + j * THREADS, acc[j]);
        acc[j] = Op::template identity<W>();
      }
    }
    __syncthreads();
  }
  if (fold == 1) return;
  // The block's only piece: its folded rows become one.
  W* sums = (W*)tile[0];
#pragma unroll
  for (u32 j = 0; j < J; ++j)
    if (threadIdx.x + j * THREADS < (u32)columns) sums[threadIdx.x + j * THREADS] = acc[j];
  for (u32 high = (u32)fold; high > 1;) {
    const u32 half = (high + 1) / 2;
    __syncthreads();
    for (u32 c = threadIdx.x; c < (high - half) * (u32)inner; c += THREADS) sums[c] = Op::of(sums[c], sums[c + half * (u32)inner]);
    high = half;
  }
  __syncthreads();
  for (u32 c = threadIdx.x; c < (u32)inner; c += THREADS) deliver(piece * inner + c, sums[c]);
}

template <class Op, class T> DEVICE void finish(const typename Op::template Accumulator<T>* __restrict__ x, T* y, i64 chunks, i64 results, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  __shared__ alignas(16) char storage[THREADS * sizeof(W)];
  W* sums = (W*)storage;
  const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const u32 place = threadIdx.y * blockDim.x + threadIdx.x;
  W acc = Op::template identity<W>();
  if (column < results)
#pragma unroll 8
    for (u32 chunk = threadIdx.y; chunk < (u32)chunks; chunk += blockDim.y) acc = Op::of(acc, x[chunk * results + column]);
  sums[place] = acc;
  for (u32 height = blockDim.y / 2; height; height /= 2) {
    __syncthreads();
    if (threadIdx.y < height) sums[place] = Op::of(sums[place], sums[place + height * blockDim.x]);
  }
  if (threadIdx.y == 0 && column < results) finish(y + column, sums[place], divisor_of<W>(divisor));
}

#define KERNEL(kind, name, T, blocks) extern "C" __global__ void __launch_bounds__(256, blocks) reduce_##kind##_##name##_##T
#define REDUCE(name, Op, T)                                                                                                             \
  KERNEL(brief, name, T, sizeof(T) > 8 ? 4 : 6)(const T* x, T* y, i64 rows, i64 length, i64 some, i64 d) { brief<Op>(x, y, rows, length, some, d); }        \
  KERNEL(group, name, T, 6)(const T* x, T* y, i64 rows, i64 length, i64 some, i64 shift, i64 d) { group<Op>(x, y, rows, length, some, shift, d); } \
  KERNEL(rows, name, T, 1)(const T* x, T* y, i64 length, i64 chunk, i64 d) { rows<Op>(x, y, length, chunk, d); }                        \
  KERNEL(slices, name, T, sizeof(T) > 8 ? 4 : 6)(const T* x, T* y, i64 o, i64 l, i64 i, i64 some, i64 shift, i64 d) { slices<Op>(x, y, o, l, i, some, shift, d); } \
  KERNEL(spans, name, T, sizeof(T) > 8 ? 4 : 6)(const T* x, T* y, i64 o, i64 l, i64 i, i64 fold, i64 tiles, i64 columns, i64 each, i64 chunk, i64 d) {      \
    spans<Op>(x, y, o, l, i, fold, tiles, columns, each, chunk, d);                                                                     \
  }                                                                                                                                     \
  KERNEL(finish, name, T, 1)(const Op::Accumulator<T>* x, T* y, i64 chunks, i64 results, i64 d) { finish<Op>(x, y, chunks, results, d); }
