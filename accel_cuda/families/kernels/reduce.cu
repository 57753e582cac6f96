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
#if __CUDA_ARCH__ >= 900
  static DEVICE u32 of_pairs(u32 a, u32 b) { u32 c; asm("max.s16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b)); return c; }
#endif
  template <class T> using Accumulator = typename Extremes<T>::type;
  template <class W> static DEVICE W identity() { return Limits<W>::low(); }
  template <class T> static DEVICE T neutral() { return lowest<T>(); }
  template <class W> static DEVICE W of(W a, W b) { return larger(a, b); }
};
struct Min {
  static constexpr bool is_sum = false;
#if __CUDA_ARCH__ >= 900
  static DEVICE u32 of_pairs(u32 a, u32 b) { u32 c; asm("min.s16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b)); return c; }
#endif
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
// Bytes of a word, by the digits of `places`: 4 is a zero, and 8 more stands for the sign of the byte.
DEVICE u32 permuted(u32 word, u32 places) { u32 to; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(to) : "r"(word), "r"(places)); return to; }
// The elements of a pack into one accumulator. Sums of bytes are kept to their last 8 bits, signed or not.
template <class Op, class T, class W, int N> DEVICE void absorb(W& to, const Pack<T, N>& pack) {
  if constexpr (Op::is_sum && sizeof(T) == 1 && N % 4 == 0) {
    const u32* words = (const u32*)&pack;
#pragma unroll
    for (int k = 0; k < N / 4; ++k) to = __dp4a(words[k], 0x01010101u, (u32)to);
#if __CUDA_ARCH__ >= 900
  } else if constexpr (!Op::is_sum && sizeof(T) == 1 && N == 16) {
    // Bytes are widened two by two, and compared so.
    constexpr bool is_signed = T(-1) < T(0);
    const u32* words = (const u32*)&pack;
    u32 pairs[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) pairs[k] = permuted(words[k / 2], k % 2 ? (is_signed ? 0xb3a2 : 0x4342) : (is_signed ? 0x9180 : 0x4140));
#pragma unroll
    for (int k = 4; k; k /= 2)
#pragma unroll
      for (int i = 0; i < k; ++i) pairs[i] = Op::of_pairs(pairs[i], pairs[i + k]);
    to = Op::of(Op::of(to, (W)(i16)pairs[0]), (W)((int)pairs[0] >> 16));
#endif
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

// -- rows that are not long

// Word `k` of 16 bytes of elements that do not change a result.
template <class Op, class T> DEVICE u32 word_of(int k) {
  Pack<T, Lanes<T>::count> all;
#pragma unroll
  for (int i = 0; i < Lanes<T>::count; ++i) all.v[i] = Op::template neutral<T>();
  return ((const Quad*)&all)->w[k];
}
// Rows of so few elements that each thread takes several at a time, element by element.
template <class Op, class T> DEVICE void brief_elements(const char* tile, T* y, u32 rows, u32 length, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 SIZE = sizeof(T), J = SIZE < 4 ? 4 : 2;
  const auto scale = divisor_of<W>(divisor);
  for (u32 row = threadIdx.x; row < rows; row += J * THREADS) {
    u32 place[J];
    W acc[J];
#pragma unroll
    for (u32 j = 0; j < J; ++j) place[j] = min(row + j * THREADS, rows - 1) * length * SIZE, acc[j] = Op::template identity<W>();
#pragma unroll 4
    for (u32 k = 0; k < length; ++k)
#pragma unroll
      for (u32 j = 0; j < J; ++j) acc[j] = Op::of(acc[j], load<W>(*(const T*)(tile + place[j] + k * SIZE)));
#pragma unroll
    for (u32 j = 0; j < J; ++j)
      if (row + j * THREADS < rows) finish(y + row + j * THREADS, acc[j], scale);
  }
}
// Rows of narrow elements, word by word, from wherever they begin.
template <class Op, class T> DEVICE void brief_words(const char* tile, u32 at, T* y, u32 rows, u32 length, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 SIZE = sizeof(T), N = 4 / SIZE;
  typedef Pack<T, N> Some;
  const u32 whole = length / N, rest = length % N, kept = (1u << rest * 8 * SIZE) - 1, nothing = word_of<Op, T>(0) & ~kept;
  const auto scale = divisor_of<W>(divisor);
  for (u32 row = threadIdx.x; row < rows; row += THREADS) {
    const u32 place = at + row * length * SIZE, shift = place % 4 * 8;
    const u32* words = (const u32*)(tile + place / 4 * 4);
    W acc = Op::template identity<W>();
    u32 before = words[0];
#pragma unroll 4
    for (u32 k = 0; k < whole; ++k) {
      const u32 after = words[k + 1], word = __funnelshift_r(before, after, shift);
      absorb<Op>(acc, *(const Some*)&word), before = after;
    }
    if (rest) {
      const u32 word = (__funnelshift_r(before, words[whole + 1], shift) & kept) | nothing;
      absorb<Op>(acc, *(const Some*)&word);
    }
    finish(y + row, acc, scale);
  }
}
template <class Op, class T> DEVICE void brief(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 per_block, i64 divisor) {
  __shared__ alignas(16) char tile[TILE + 32];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, rows - first), many = (u32)length;
  const u32 at = stage(tile, x + first * length, mine * many, (u64)x, (u64)(x + rows * length));
  if constexpr (sizeof(T) < 4)
    if (many >= 8) return brief_words<Op>(tile, at, y + first, mine, many, divisor);
  brief_elements<Op>(tile + at, y + first, mine, many, divisor);
}

// A granule whose first `bytes` bytes, or all but them, are replaced by what does not change a result.
template <class Op, class T> DEVICE Quad cut(Quad all, u32 bytes, bool is_end) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 kept = __funnelshift_lc(0, 0xffffffffu, (u32)max(0, (int)bytes * 8 - 32 * k)) ^ (is_end ? 0xffffffffu : 0);
    all.w[k] = (all.w[k] & kept) | (word_of<Op, T>(k) & ~kept);
  }
  return all;
}
// Rows of more than a granule.
template <class Op, class T> DEVICE void group(const T* __restrict__ x, T* y, i64 rows, i64 length, i64 per_block, i64 shift, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  __shared__ alignas(16) char tile[TILE + 32];
  const i64 first = (i64)blockIdx.x * per_block;
  const u32 mine = (u32)min(per_block, rows - first), bytes = (u32)length * (u32)sizeof(T), width = 1u << shift, lane = threadIdx.x & (width - 1);
  const u32 at = stage(tile, x + first * length, mine * (u32)length, (u64)x, (u64)(x + rows * length));
  const auto scale = divisor_of<W>(divisor);
  typedef Pack<T, Lanes<T>::count> Some;
  for (u32 row0 = 0; row0 < mine; row0 += THREADS >> shift) {
    const u32 row = row0 + (threadIdx.x >> shift), start = at + min(row, mine - 1) * bytes, end = start + bytes, head = start / 16, tail = (end - 1) / 16;
    W acc = Op::template identity<W>();
#pragma unroll 4
    for (u32 g = head + 1 + lane; g < tail; g += width) {
      const Quad all = take_quad(tile + 16 * g);
      absorb<Op>(acc, *(const Some*)&all);
    }
    for (u32 is_end = lane; is_end < 2; is_end += width) {
      const Quad all = cut<Op, T>(take_quad(tile + 16 * (is_end ? tail : head)), is_end ? end - 16 * tail : start % 16, is_end);
      absorb<Op>(acc, *(const Some*)&all);
    }
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
      for (u32 j = 0; j < 4; ++j, place[j - 1] += step) acc[j] = Op::of(acc[j], load<W>(*(const T*)(tile + place[j])));
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

// -- partial results

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
